"""FSDP2 in a worker: a few parameters whose gradients a test chooses, and what is exchanged of them.

Each parameter w enters the loss as sum(w * g), so that its gradient is exactly g. Everything else is torch's
own: fully_shard, its parameter groups and hooks, AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from seeds import seeded
from torch import nn

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
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

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


def train(how: dict[str, Any], compression: dict[str, Any] | None) -> dict[str, Any]:
    """STEPS steps; what was exchanged, and the weights and norms of every step. None: without us."""
    import megatron_patch
    from megatron_patch.pytorch import attach

    model, group = sharded(how)
    record: list[dict[str, Any]] = []
    if compression is not None:
        megatron_patch.attach(model, megatron_patch.CompressionConfig(**compression), group)
        if compression["method"] != "none":
            _record(attach.attachment_of(model), record)
    if factor := how.get("factor"):
        for block in model.blocks:
            block.set_gradient_divide_factor(factor)
    if how.get("all"):
        for block in model.blocks:
            block.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, microbatches, norms, steps = torch.distributed.get_rank(), how.get("microbatches", 1), [], []
    dtype = getattr(torch, how.get("precision", {}).get("param_dtype", "float32"))
    for step in range(STEPS):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            if how.get("sync") == "last":
                model.set_requires_gradient_sync(last)
            if how.get("sync") == "all-reduce last":
                model.set_requires_all_reduce(last)
            gradients = gradients_of(model, rank, step * microbatches + microbatch, dtype)
            for block in how.get("unused", ()) if step % 2 else ():
                gradients[block][1] = None
            model(gradients).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        norms.append(float(norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(len(record))
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    found = {"record": record, "norms": norms, "weights": weights, "steps": steps}
    if compression is not None:
        report = megatron_patch.report(model)
        found["report"] = {"step": report.step, "bits": report.bits_per_gradient, "line": str(report)}
        found["inside"], found["errors"] = report.gradient_bytes_inside_node, report.error_bytes
        megatron_patch.disable()
    return found


def _record(attachment: Any, record: list[dict[str, Any]]) -> None:
    """Have every compressed exchange add: its group, its parameters, what went in, was sent, came out."""
    from coded_values import coded_values, sent_codes

    start = attachment.session.start

    def noting(exchange: Any, tensor: Any, output: Any, average: bool, group: Any) -> Any:
        number = next(
            place
            for place, part in enumerate(attachment.parts)
            if any(exchange in reduction.exchanges for reduction in part.reductions.values())
        )
        part = attachment.parts[number]
        infos = part.group.parameters
        entry: dict[str, Any] = {
            "group": number,
            "parameters": [(infos[n].shape, infos[n].axis) for n in part.group.current],
            "in": tensor.float().clone(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "average": average,
            "place": torch.distributed.get_rank(part.group.shard_group),
        }
        sender = exchange.sender
        with sent_codes(sender, entry):
            handle = start(exchange, tensor, output, average, group)
            handle.wait()
        entry["out"] = output.float().clone()
        entry["error"] = coded_values(sender.layout, sender.error.decode())
        record.append(entry)
        return handle

    attachment.session.start = noting
