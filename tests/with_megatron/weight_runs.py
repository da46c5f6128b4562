"""What the tests of the exact weight gather run in workers: a tiny GPT, with and without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from with_megatron.gpt_model import build
from with_megatron.seam_runs import attach, attachment_of, leaves_of

import megatron_patch

RATE = {"learning_rate": 5e-4, "optimizer": {"adam_eps": 1e-8}}
"""For weights N(0, 0.15^2) this rate is as 5e-5 for the usual N(0, 0.02^2)."""


def weight_run(
    model: dict[str, Any], options: dict[str, Any], steps: int, around: str = "nothing"
) -> dict[str, Any]:
    """Train; all that a rank has at the end, and what every step told; `around` is in AROUND."""
    optimizer = {"optimizer": RATE["optimizer"] | model.get("optimizer", {})}
    gpt = build(**({"learning_rate": RATE["learning_rate"]} | model | optimizer))
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**{"start_step": 0} | options))
    weights = [attachment_of(chunk).weights for chunk in gpt.chunks]
    told, bits = [], []
    (other,) = (one for one in AROUND if one.__name__ == around)
    other(gpt, -1)
    for step in range(steps):
        gpt.backward(step)
        successful, norm, _ = gpt.optimizer.step()
        if successful:
            gpt.scheduler.step(increment=1)
        told.append((bool(successful), None if norm is None else float(norm)))
        reports = [bucket.traffic for chunk in weights for bucket in chunk.report]
        elements = sum(traffic.elements for traffic in reports)
        bits.append(8 * sum(traffic.nbytes for traffic in reports) / elements if elements else 0.0)
        other(gpt, step)
    raw = sum((chunk.raw_gathers for chunk in weights), start=Counter())
    gpt.gather()
    report = {
        "told": told,
        "losses": gpt.losses,
        "weights": {name: bits_of(parameter) for name, parameter in gpt.parameters.items()},
        "optimizer": [bits_of(tensor) for tensor in optimizer_tensors(gpt.optimizer)],
        "bits": bits,
        "raw": dict(raw),
        "stock": [seam.stock_because for chunk in weights for seam in chunk.seams],
        "unchanged": [
            (int(bucket.unchanged), bucket.weights)
            for chunk in weights
            for bucket in chunk.report
            if bucket.unchanged is not None
        ],
    }
    megatron_patch.disable()
    return report


def both(model: dict[str, Any], method: dict[str, Any], steps: int, around: str = "nothing") -> Any:
    """The same training with Megatron's own weight gather, and with the exact one."""
    return [
        weight_run(model, {"method": "none", **method, "weight_gather": gather}, steps, around)
        for gather in ("stock", "exact")
    ]


def differences(stock: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    """What is not bit for bit the same in two runs."""
    found = [name for name in ("told", "losses") if stock[name] != exact[name]]
    assert stock["weights"].keys() == exact["weights"].keys()
    assert len(stock["optimizer"]) == len(exact["optimizer"]) > 0
    found += [
        name for name, bits in stock["weights"].items() if not np.array_equal(bits, exact["weights"][name])
    ]
    pairs = enumerate(zip(stock["optimizer"], exact["optimizer"], strict=True))
    return found + [f"optimizer {place}" for place, pair in pairs if not np.array_equal(*pair)]


def unused_module(weight_gather: str, steps: int) -> dict[str, Any]:
    """Overlapped gathers, and a module that every second step leaves out: its bucket group is not gathered.

    Adam's momentum moves its weights on all the same.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

    class Halves(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            torch.manual_seed(7)
            self.always, self.sometimes = (torch.nn.Linear(40, 30, dtype=torch.bfloat16) for _ in range(2))
            for parameter in self.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            for parameter in self.sometimes.parameters():
                parameter.allreduce = False  # an expert's: a bucket group of its own

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            y = self.always(x)
            return ((y + self.sometimes(x)) if both else y).float().square().mean()

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    model = DistributedDataParallel(config, ddp, Halves())
    options = {"optimizer": "adam", "lr": 1e-3, "bf16": True, "params_dtype": torch.bfloat16}
    options |= {"use_distributed_optimizer": True, "overlap_param_gather": True, "clip_grad": 0.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), [model])
    attach([model], {"method": "none", "weight_gather": weight_gather})
    losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(16, 40, generator=generator).bfloat16(), step % 2 == 0)
        loss.backward()
        losses.append(float(loss))
        model.finish_grad_sync()
        optimizer.step()
    behind = [bits_of(parameter) for parameter in model.parameters()]
    raw = dict(attachment_of(model).weights.raw_gathers)
    model.start_param_sync(force_sync=True)
    report = {
        "told": raw if weight_gather == "exact" else {},
        "losses": losses,
        "behind": behind,
        "weights": {name: bits_of(parameter) for name, parameter in model.named_parameters()},
        "optimizer": [bits_of(tensor) for tensor in optimizer_tensors(optimizer)],
    }
    megatron_patch.disable()
    return report


def nothing(gpt: Any, step: int) -> None:
    pass


def evaluations(gpt: Any, step: int) -> None:
    """Every few steps, hooks off as in megatron.training: with overlap, weights are gathered by force."""
    if step < 0 or step % 7 != 6:
        return
    hooked = [chunk for chunk in gpt.chunks if chunk.use_forward_hook]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    for chunk in hooked:
        chunk.enable_forward_pre_hook()


def evaluations_in_inference_mode(gpt: Any, step: int) -> None:
    """Forward passes under torch.inference_mode after some steps: with overlap, they gather what the step has
    updated, into buffers that they may be the first to need."""
    if step < 0 or step % 3:
        return
    with torch.inference_mode():
        gpt.evaluate(step)


def forced_twice(gpt: Any, step: int) -> None:
    """Weights are gathered by force after every third step, twice."""
    if step % 3 == 2:
        for chunk in [*gpt.chunks, *gpt.chunks]:
            chunk.start_param_sync(force_sync=True)


def user_edits(gpt: Any, step: int) -> None:
    """Between the step and the next forward pass every rank scales some weights, as qk-clip does."""
    if step % 5 == 3:
        for place, parameter in enumerate(gpt.parameters.values()):
            if place % 3 == 0:
                parameter.data.mul_(0.75)


def one_copy_changes(gpt: Any, step: int) -> None:
    """After some steps one rank's weights lose a bit, in its own shard or a copy of another's."""
    rank = torch.distributed.get_rank()
    if step % 4 == 1 and step // 4 % torch.distributed.get_world_size() == rank:
        parameters = list(gpt.parameters.values())
        bits = parameters[step % len(parameters)].data.view(-1).view(torch.int16)
        bits[step % bits.numel()] ^= 1 << (step % 8)


AROUND = (nothing, evaluations, evaluations_in_inference_mode, forced_twice, user_edits, one_copy_changes)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, so that NaN and -0 compare too."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of every optimizer in a chain, in their order."""
    for part in leaves_of(optimizer):
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            for parameter in group["params"]:
                yield parameter
                for _, value in sorted(part.optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        yield value
