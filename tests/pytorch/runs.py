"""FSDP2 and DDP in a worker: a few parameters whose gradients a test chooses, and what is exchanged of them.

Each parameter w enters the loss as sum(w * g), so that its gradient is exactly g. Everything else is torch's
own: fully_shard, DDP's buckets, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from coded_values import sent_codes
from seeds import seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import megatron_patch
from megatron_patch.pytorch import attach

BLOCKS = (((13, 17), (70, 3), (40,)), ((9, 40), (5, 129), (7,)), ((24, 64),))
"""Shapes of the parameters of each block: rows shorter than 16 elements, and lengths that no number of ranks
divides."""
STEPS = 6


class Block(nn.Module):
    """Some parameters, by themselves."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape) / 16))

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        parts = zip(self.parameters(), gradients, strict=True)
        return sum((w * g).sum() for w, g in parts if g is not None)  # type: ignore[return-value]


class Model(nn.Module):
    """The blocks, which a test shards."""

    def __init__(self, blocks: tuple[tuple[tuple[int, ...], ...], ...] = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(seeded(5))
        self.blocks = nn.ModuleList(map(Block, blocks))

    def forward(self, gradients: list[list[torch.Tensor | None]]) -> torch.Tensor:
        parts = zip(self.blocks, gradients, strict=True)
        return sum(block(mine) for block, mine in parts)  # type: ignore[return-value]


def gradients_of(model: Model, rank: int, number: int, dtype: torch.dtype) -> list[list[Any]]:
    """One gradient for each parameter; sizes differ between rows, and some rows are zero."""
    generator = torch.Generator().manual_seed(seeded(1009 * rank + number))
    found = []
    for block in model.blocks:
        mine = []
        for parameter in block.parameters():
            g = torch.randn(parameter.shape, generator=generator)
            rows = torch.rand((len(g), *[1] * (g.dim() - 1)), generator=generator)
            mine.append((g * torch.exp2(12 * rows - 10) * (rows > 0.1)).to(dtype))
        found.append(mine)
    return found


def sharded(how: dict[str, Any]) -> tuple[Model, Any]:
    """A model after fully_shard, and its replicate group if the mesh does not have it."""
    model, ranks, replicas = Model(), dist.get_world_size(), how.get("replicas", 1)
    for number in how.get("frozen", ()):
        next(iter(model.blocks[number].parameters())).requires_grad_(False)
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    native = replicas > 1 and not how.get("group")
    options: dict[str, Any] = {"mesh": mesh if native else mesh["shard"]}
    options["reshard_after_forward"] = how.get("reshard", True)
    names = {name: getattr(torch, dtype) for name, dtype in how.get("precision", {}).items()}
    options["mp_policy"] = MixedPrecisionPolicy(**names)
    if how.get("axis"):
        options["shard_placement_fn"] = lambda p: Shard(1) if p.shape == (24, 64) else None
    if how.get("together"):
        fully_shard([model.blocks[0], model.blocks[1]], **options)
        fully_shard(model.blocks[2], **options)
    else:
        for block in model.blocks:
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model, mesh.get_group("replicate") if how.get("group") else None


def wrapped(how: dict[str, Any]) -> tuple[Any, Model, Any]:
    """What is attached, the model in it, and its replicate group if the mesh does not have it."""
    if how.get("kind") != "ddp":
        model, group = sharded(how)
        return model, model, group
    model = Model().to(getattr(torch, how.get("dtype", "float32")))
    for number in how.get("frozen", ()):
        next(iter(model.blocks[number].parameters())).requires_grad_(False)
    if how.get("double"):
        model.blocks[0].double()  # Its bucket is the last one.
    ddp = DistributedDataParallel(model, bucket_cap_mb=how.get("bucket_mb", 0.01), **how.get("options", {}))
    return ddp, model, None


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor, gathered; another tensor as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(how: dict[str, Any], compression: dict[str, Any] | None) -> dict[str, Any]:
    """STEPS steps; what was exchanged, and the weights and norms of every step. None: without us."""
    wrapper, model, group = wrapped(how)
    is_ddp = wrapper is not model
    record: list[dict[str, Any]] = []
    if compression is not None:
        megatron_patch.attach(wrapper, megatron_patch.CompressionConfig(**compression), group)
        if compression["method"] != "none":
            (_record_ddp if is_ddp else _record)(attach.attachment_of(wrapper), record)
    for block in model.blocks if how.get("factor") else ():
        block.set_gradient_divide_factor(how["factor"])
    for block in model.blocks if how.get("all") else ():
        block.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-2)
    rank, microbatches, norms, steps = torch.distributed.get_rank(), how.get("microbatches", 1), [], []
    dtype = next(model.parameters()).dtype
    dtype = getattr(torch, how["precision"]["param_dtype"]) if "precision" in how else dtype
    for step in range(STEPS):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            if how.get("sync") == "last" and not is_ddp:
                model.set_requires_gradient_sync(last)
            if how.get("sync") == "all-reduce last":
                model.set_requires_all_reduce(last)
            gradients = gradients_of(model, rank, step * microbatches + microbatch, dtype)
            for block in how.get("unused", ()) if step % 2 and (rank or not is_ddp) else ():
                gradients[block][1] = None
            with wrapper.no_sync() if is_ddp and how.get("sync") and not last else nullcontext():
                wrapper(gradients).backward()
        norms.append(float(full(torch.nn.utils.clip_grad_norm_(wrapper.parameters(), 1e3))))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(len(record))
    weights = [full(parameter).float().clone() for parameter in wrapper.parameters()]
    found = {"record": record, "norms": norms, "weights": weights, "steps": steps}
    if compression is not None:
        report = megatron_patch.report(wrapper)
        found["report"] = {"step": report.step, "bits": report.bits_per_gradient}
        found["inside"] = report.gradient_bytes_inside_node
        megatron_patch.disable()
        if is_ddp:
            before = len(record)
            wrapper(gradients).backward()
            assert len(record) == before, "disable() restores DDP's own exchange"
    return found


class _Noting:
    """A handle that records its exchange's output when it is over."""

    def __init__(self, handle: Any, entry: dict[str, Any], output: torch.Tensor) -> None:
        self.handle, self.entry, self.output = handle, entry, output

    def wait(self) -> None:
        self.handle.wait()
        self.entry.setdefault("out", self.output.float().clone())


def _noting(
    attachment: Any, record: list[dict[str, Any]], of: Callable[[Any], dict[str, Any]]
) -> Callable[..., Any]:
    """Session.start, which adds to `record` what goes in, is sent and comes out, and what `of` says."""
    start = attachment.session.start

    def noting(exchange: Any, tensor: Any, output: Any, average: bool, group: Any) -> Any:
        entry = of(exchange) | {"in": tensor.float().clone(), "average": average}
        entry["dtype"] = {torch.float32: "fp32", torch.bfloat16: "bf16"}[tensor.dtype]
        with sent_codes(exchange.sender, entry):
            handle = start(exchange, tensor, output, average, group)
        record.append(entry)
        return _Noting(handle, entry, output)

    return noting


def _record(attachment: Any, record: list[dict[str, Any]]) -> None:
    def of(exchange: Any) -> dict[str, Any]:
        number, part = next(
            (number, part)
            for number, part in enumerate(attachment.parts)
            if any(exchange in reduction.exchanges for reduction in part.reductions.values())
        )
        parameters = [(p.shape, p.axis) for p in part.parameters(part.group.current)]
        place = torch.distributed.get_rank(part.group.shard_group)
        return {"parameters": parameters, "place": place, "key": f"{number} {parameters}"}

    attachment.session.start = _noting(attachment, record, of)


def _record_ddp(attachment: Any, record: list[dict[str, Any]]) -> None:
    def of(exchange: Any) -> dict[str, Any]:
        names = next(names for names, known in attachment._exchanges.items() if known is exchange)
        shapes = [attachment._parameters[name].shape for name in names]
        return {"shapes": shapes, "key": str(shapes)}

    attachment.session.start = _noting(attachment, record, of)
