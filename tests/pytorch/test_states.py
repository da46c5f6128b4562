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
    for sender, part in attach.attachment_of(model).senders():
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


def moved_buckets() -> list[tuple[dict[str, np.ndarray], int]]:
    """What this rank's senders have pending, and the number of exchanges: before and after buckets change."""
    from types import SimpleNamespace

    import megatron_patch
    from megatron_patch.collectives.exchange import ALL_REDUCE
    from megatron_patch.pytorch import attach

    model, optimizer = built(DDP, LOCO)
    steps(model, optimizer, 0, 3)
    attachment = attach.attachment_of(model)

    def pending() -> tuple[dict[str, np.ndarray], int]:
        found = {}
        for sender, part in attachment.senders():
            bucket = part.in_bucket(sender.error.flat())
            if part.kind == ALL_REDUCE:
                found |= {piece.key: piece.of(bucket).clone().numpy() for piece in part.pieces}
        return found, len(attachment.session.exchanges)

    told = [pending()]
    parameters = list(model.module.parameters())
    for chosen in (parameters[1::2], parameters[::2]):
        attachment._exchange_of(SimpleNamespace(parameters=lambda chosen=chosen: chosen))
    told.append(pending())
    megatron_patch.disable()
    return told


def test_errors_follow_their_parameters_when_ddp_changes_its_buckets(pool) -> None:
    for (before, several), (after, two) in pool.run(moved_buckets, world_size=4):
        assert several == 2
        assert two == 2
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert np.abs(after[name] - values).max() <= np.abs(values).max() / 32, name
        assert any(values.any() for values in before.values())


def without_an_optimizer(kind: dict[str, Any]) -> tuple[int, bool]:
    """Only rank 0's optimizer has parameters: passes that ended, and whether exchanges are compressed."""
    import torch
    import torch.distributed as dist

    import megatron_patch
    from megatron_patch.pytorch import attach

    model, _ = built(kind, {"method": "loco"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2) if dist.get_rank() == 0 else None
    whole, ended = getattr(model, "module", model), 0
    for step in range(14):
        model(gradients_of(whole, dist.get_rank(), step, torch.float32)).backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()
        ended += 1
    found = ended, attach.attachment_of(model).session.active
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", [DDP, FLAT], ids=str)
def test_ranks_whose_optimizer_steps_are_not_seen_ask_when_the_others_do(pool, kind) -> None:
    """As with a ZeRO-1 of one's own, in which a rank may own nothing."""
    told = pool.run(without_an_optimizer, kind, world_size=2)
    assert told == [(14, True)] * 2, "a constant rate has stopped rising after ten steps"


def gathered_bytes() -> int:
    """Bytes of the largest object that every rank sends to every other one for a state dict."""
    import pickle
    from unittest import mock

    import torch.distributed as dist

    import megatron_patch

    model, optimizer = built(FLAT, LOCO)
    steps(model, optimizer, 0, 1)
    sizes, original = [], dist.all_gather_object

    def watched(everyone: Any, mine: Any, *args: Any) -> None:
        sizes.append(len(pickle.dumps(mine)))
        original(everyone, mine, *args)

    with mock.patch.object(dist, "all_gather_object", watched):
        megatron_patch.state_dict(model)
    megatron_patch.disable()
    return max(sizes)


def test_equal_layouts_are_not_gathered_from_every_rank(pool) -> None:
    """Each has the chunks of all ranks: of a model of 8 billion parameters on 512 ranks hundreds of MB."""
    assert max(pool.run(gathered_bytes, world_size=4)) < 1000
