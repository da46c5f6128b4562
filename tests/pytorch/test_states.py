"""Error states of FSDP2 and DDP in torch.distributed.checkpoint: resumed exactly, or in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytorch.fsdp2_runs import Model, gradients_of, sharded

LOCO = {"method": "loco", "start_step": 0, "reset_interval": 0}
FLAT, HYBRID = {"kind": "flat"}, {"kind": "hybrid", "replicas": 2}
GROUP, DDP = {"kind": "group", "replicas": 2, "group": True}, {"kind": "ddp"}


def built(how: dict[str, Any], compression: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import megatron_patch

    config = megatron_patch.CompressionConfig(**compression)
    if how["kind"] == "ddp":
        model = megatron_patch.attach(DistributedDataParallel(Model(), bucket_cap_mb=0.01), config)
    else:
        whole, group = sharded(how)
        model = megatron_patch.attach(whole, config, group)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: Any, optimizer: Any, first: int, last: int, unused: bool = False) -> None:
    import torch

    whole = getattr(model, "module", model)
    for step in range(first, last):
        gradients = gradients_of(whole, torch.distributed.get_rank(), step, torch.float32)
        if unused and step % 2:
            gradients[0][1] = None
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()


def errors(model: Any) -> dict[str, np.ndarray]:
    """By parameter, the mean over all ranks of what is pending in all senders' errors, whole."""
    import torch
    import torch.distributed as dist

    from megatron_patch.pytorch import attach

    shapes = {name: tuple(p.shape) for name, p in Model().named_parameters()}
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for sender, part in attach._attachments[model].senders():
        bucket = part.in_bucket(sender.error.flat() * part.weight)
        for piece in part.pieces:
            if 0 not in piece.shape:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                found[piece.key][box] += piece.of(bucket)
    for tensor in found.values():
        dist.all_reduce(tensor)
    return {name: tensor.numpy() for name, tensor in found.items()}


def run(
    how: dict[str, Any], folder: str, save: bool, resume: bool, unused: bool = False, method: str = "loco"
) -> dict[str, Any]:
    """Three steps, a checkpoint, three more; or the checkpoint and three more."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import megatron_patch

    model, optimizer = built(how, LOCO | {"method": method})
    found: dict[str, Any] = {}
    if not resume:
        steps(model, optimizer, 0, 3, unused)
    if save:
        weights, moments = get_state_dict(model, optimizer)
        states = megatron_patch.state_dict(model)
        dcp.save({"model": weights, "optimizer": moments, "loco": states}, checkpoint_id=folder)
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        states = megatron_patch.state_dict(model, reader=dcp.FileSystemReader(folder))
        dcp.load({"loco": states}, checkpoint_id=folder)
        megatron_patch.load_state_dict(model, states)
    found["errors"] = errors(model)
    if how["kind"] != "ddp":
        steps(model, optimizer, 3, 6, unused)
        found["weights"] = [p.full_tensor().detach().numpy() for p in model.parameters()]
        found["after"] = errors(model)
        found["step"] = megatron_patch.report(model).step
    megatron_patch.disable()
    torch.distributed.barrier()
    return found


@pytest.mark.parametrize(
    ("how", "unused"), [(FLAT, False), (FLAT, True), (HYBRID, False), (GROUP, False)], ids=str
)
def test_a_resumed_run_is_the_undisturbed_one(
    pool, how: dict[str, Any], unused: bool, tmp_path: Path
) -> None:
    whole = pool.run(run, how, str(tmp_path), True, False, unused, world_size=4)
    again = pool.run(run, how, str(tmp_path), False, True, unused, world_size=4)
    for first, second in zip(whole, again, strict=True):
        assert any(values.any() for values in first["errors"].values())
        for what in ("errors", "after"):
            for name, values in first[what].items():
                assert np.array_equal(values, second[what][name]), (what, name)
        assert all(map(np.array_equal, first["weights"], second["weights"]))
        assert second["step"] == 6


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        (FLAT, FLAT, 2),
        (FLAT, FLAT, 3),
        (HYBRID, FLAT, 4),
        (FLAT, HYBRID, 4),
        (HYBRID, FLAT, 2),
        (FLAT, DDP, 2),
        (DDP, FLAT, 4),
        (DDP, HYBRID, 4),
        (DDP, DDP, 4),
        (DDP, DDP, 2),
    ],
    ids=str,
)
def test_what_is_pending_is_carried_to_another_layout(
    pool, before: dict[str, Any], after: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """In the mean gradient what is pending of each element stays what it was, but for its 8-bit code."""
    old = pool.run(run, before, str(tmp_path), True, False, world_size=4)[0]["errors"]
    new = pool.run(run, after, str(tmp_path), False, True, world_size=ranks)[0]["errors"]
    for name, values in old.items():
        rows = np.abs(values).reshape(len(values), -1).max() if values.ndim > 1 else 0.0
        assert np.abs(new[name] - values).max() <= rows / 32, name
        assert values.ndim < 2 or rows > 0
