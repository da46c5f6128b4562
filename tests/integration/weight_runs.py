"""What the tests of the exact weight gather run in workers: a tiny GPT, with and without it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

RATE = {"learning_rate": 1e-3, "optimizer": {"adam_eps": 1e-8}}
"""Of a model whose weights are N(0, 0.15^2): as 1e-4 in one of the usual 0.02^2."""

Between = Callable[[Any, int], None]
"""Called with the model and the step, between an optimizer's step and the next forward pass."""


def weight_run(
    model: dict[str, Any],
    weight_gather: str,
    steps: int,
    method: dict[str, Any] | None = None,
    between: Between | None = None,
) -> dict[str, Any]:
    """Train; all that a rank has at the end, and what every step told."""
    from integration.gpt_model import build

    import megatron_patch
    from megatron_patch.integration.attach import attachment_of

    options = {"optimizer": RATE["optimizer"] | model.get("optimizer", {})}
    gpt = build(**({"learning_rate": RATE["learning_rate"]} | model | options))
    config = megatron_patch.CompressionConfig(
        **{"method": "none", "weight_gather": weight_gather, **(method or {})}
    )
    megatron_patch.attach(gpt.chunks, config)
    weights = [attachment_of(chunk).weights for chunk in gpt.chunks]
    told, bits = [], []
    for step in range(steps):
        gpt.backward(step)
        told.append(gpt.optimizer.step()[:2])
        if told[-1][0]:
            gpt.scheduler.step(increment=1)
        reports = [bucket.traffic for chunk in weights for bucket in chunk.report]
        elements = sum(traffic.elements for traffic in reports)
        bits.append(8 * sum(traffic.nbytes for traffic in reports) / elements if elements else 0.0)
        if between is not None:
            between(gpt, step)
    raw = sum((chunk.raw_gathers for chunk in weights), start=Counter())
    gpt.gather()
    report = {
        "told": [(bool(successful), None if norm is None else float(norm)) for successful, norm in told],
        "losses": gpt.losses,
        "weights": {name: bits_of(parameter) for name, parameter in gpt.parameters.items()},
        "optimizer": [bits_of(tensor) for tensor in optimizer_tensors(gpt.optimizer)],
        "bits": bits,
        "raw": dict(raw),
        "coded": [seam.stock_because for chunk in weights for seam in chunk.seams],
    }
    megatron_patch.disable()
    return report


def bits_of(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, so that NaN and -0 compare too."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of every optimizer in a chain, in their order."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            for parameter in group["params"]:
                yield parameter
                for _, value in sorted(part.optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        yield value


@contextlib.contextmanager
def without_hooks(gpt: Any) -> Iterator[None]:
    """Megatron's evaluation and checkpoints: with overlap, weights are gathered by force, hooks are off."""
    hooked = [chunk for chunk in gpt.chunks if chunk.use_forward_hook]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in hooked:
        chunk.enable_forward_pre_hook()
