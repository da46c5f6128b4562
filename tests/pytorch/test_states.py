"""Error states of FSDP2 and DDP in torch.distributed.checkpoint: exact in the same layout, else zero."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from coded_values import flat_error
from pytorch.runs import Model, full, gradients_of, wrapped
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from with_megatron.seam_runs import logged

import megatron_patch
from megatron_patch.pytorch import attach

LOCO = {"method": "loco", "start_step": 0, "reset_interval": 0}
FLAT, HYBRID = {"kind": "flat"}, {"kind": "hybrid", "replicas": 2}
STATIC = {"kind": "ddp", "options": {"static_graph": True}}
SEVERAL = STATIC | {"double": True}
"""A static graph of several buckets at first: there is one for each dtype."""
GROUP, DDP = {"kind": "group", "replicas": 2, "group": True}, {"kind": "ddp"}


def built(how: dict[str, Any], compression: dict[str, Any]) -> tuple[Any, Any]:
    model, _, group = wrapped(how)
    megatron_patch.attach(model, megatron_patch.CompressionConfig(**compression), group)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: Any, optimizer: Any, first: int, last: int, unused: bool = False) -> None:
    whole = getattr(model, "module", model)
    for step in range(first, last):
        gradients = gradients_of(whole, torch.distributed.get_rank(), step, torch.float32)
        if unused and step % 2:
            gradients[0][1] = None
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()


def errors(model: Any) -> list[np.ndarray]:
    """This rank's errors, one array for each sender."""
    exchanged = attach.attachment_of(model).exchanged()
    return [flat_error(sender.error).numpy() for each in exchanged for sender in each.exchange.senders]


def run(
    how: dict[str, Any], folder: str, save: bool, resume: bool, unused: bool = False, method: str = "loco"
) -> dict[str, Any]:
    """Three steps, a checkpoint, three more; or the checkpoint and three more."""
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
        with logged() as lines:
            megatron_patch.load_state_dict(model, states)
        found["lines"] = lines
    found["errors"] = errors(model)
    steps(model, optimizer, 3, 6, unused)
    found["weights"] = [full(p).numpy() for p in model.parameters()]
    found["after"] = errors(model)
    found["step"] = megatron_patch.report(model).step
    megatron_patch.disable()
    torch.distributed.barrier()
    return found


@pytest.mark.parametrize(
    ("how", "unused"),
    [
        (FLAT, False),
        (FLAT, True),
        (HYBRID, False),
        (GROUP, False),
        (DDP, False),
        (STATIC, False),
        (SEVERAL, False),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_undisturbed_one(
    pool, how: dict[str, Any], unused: bool, tmp_path: Path
) -> None:
    whole = pool.run(run, how, str(tmp_path), True, False, unused, world_size=4)
    again = pool.run(run, how, str(tmp_path), False, True, unused, world_size=4)
    for first, second in zip(whole, again, strict=True):
        assert all(values.any() for values in first["errors"])
        for what in ("errors", "after", "weights"):
            assert len(first[what]) == len(second[what])
            assert all(map(np.array_equal, first[what], second[what])), what
        assert second["step"] == 6
    assert any("error states restored exactly" in line for line in again[0]["lines"])


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [(FLAT, FLAT, 2), (HYBRID, FLAT, 4), (FLAT, DDP, 4), (DDP, HYBRID, 4), (DDP, DDP, 2)],
    ids=str,
)
def test_in_another_layout_errors_start_from_zero(
    pool, before: dict[str, Any], after: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    pool.run(run, before, str(tmp_path), True, False, world_size=4)
    for rank, report in enumerate(pool.run(run, after, str(tmp_path), False, True, world_size=ranks)):
        assert not any(values.any() for values in report["errors"])
        assert any("of another layout" in line for line in report["lines"]) == (rank == 0)
        assert report["step"] == 6


def in_other_scales(scales: list[float]) -> list[list[int]]:
    """In a worker: what becomes of errors, of a model whose loss is scaled and of one whose loss is not, when
    a state of both is restored, saved and restored where the scaler has other scales than the first one."""
    loops = [built(DDP, LOCO) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    for step in range(3):
        for (model, optimizer), scale in zip(loops, (scaler.scale, lambda loss: loss), strict=True):
            scale(model(gradients_of(model.module, dist.get_rank(), step, torch.float32))).backward()
            optimizer.step()
            optimizer.zero_grad()
    models = [model for model, _ in loops]
    before, found = [np.concatenate(errors(model)) for model in models], []
    assert all(values.any() for values in before)
    for scale in scales[1:]:
        state = megatron_patch.state_dict(models)
        megatron_patch.load_state_dict(models, state, torch.amp.GradScaler("cpu", init_scale=scale))
        after = [np.concatenate(errors(model)) for model in models]
        pairs = list(zip(before, after, strict=True))
        found.append([next((k for k in (1, 2, 8) if np.array_equal(b, k * a)), 0) for a, b in pairs])
    megatron_patch.disable()
    return found


def test_errors_are_restored_in_the_loss_scale_that_is_loaded(pool) -> None:
    found = pool.run(in_other_scales, [4.0, 8.0, 32.0], world_size=2)
    assert found == [[[2, 1], [8, 1]]] * 2


def moved_buckets() -> list[tuple[int, bool]]:
    """The number of exchanges, and whether any sender has errors: before and after buckets change."""
    model, optimizer = built(DDP, LOCO)
    steps(model, optimizer, 0, 3)
    attachment = attach.attachment_of(model)

    def pending() -> tuple[int, bool]:
        return len(attachment.session.exchanges), any(values.any() for values in errors(model))

    told = [pending()]
    parameters = list(model.module.parameters())
    for chosen in (parameters[1::2], parameters[::2]):
        attachment._exchange_of(
            SimpleNamespace(parameters=lambda chosen=chosen: chosen, buffer=lambda chosen=chosen: chosen[0])
        )
    told.append(pending())
    megatron_patch.disable()
    return told


def test_errors_start_from_zero_when_ddp_changes_its_buckets(pool) -> None:
    assert pool.run(moved_buckets, world_size=4) == [[(2, True), (2, False)]] * 4


def owners(folder: str, resume: bool, together: bool) -> dict[str, Any]:
    """Two models with parameters of the same names, side by side or on two pairs of ranks; one is deeper."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    models = [
        DistributedDataParallel(
            torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(depth))),
            process_group=dist.group.WORLD if together else pairs[depth - 1],
        )
        for depth in ((1, 2) if together else (1 + rank // 2,))
    ]
    for model in models:
        megatron_patch.attach(model, megatron_patch.CompressionConfig(**LOCO))
    ledgers = [attach.attachment_of(model).session.ledger for model in models]
    with logged() as lines:
        if resume:
            states = megatron_patch.state_dict(models, reader=dcp.FileSystemReader(folder))
            dcp.load({"loco": states}, checkpoint_id=folder)
            megatron_patch.load_state_dict(models, states)
        for model in [] if resume else models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2 + len(model.module)):
                model(torch.randn(4, 32)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if not resume:
            dcp.save({"loco": megatron_patch.state_dict(models)}, checkpoint_id=folder)
    found = {
        "errors": [e for model in models for e in errors(model)],
        "steps": [each.steps for each in ledgers],
    }
    megatron_patch.disable()
    return found | {"lines": [line for line in lines if "restored" in line]}


@pytest.mark.parametrize("together", [True, False])
def test_each_of_two_models_gets_its_own_errors_and_counters(pool, together: bool, tmp_path: Path) -> None:
    before, after = (pool.run(owners, str(tmp_path), resume, together, world_size=4) for resume in (0, 1))
    for rank, (saved, loaded) in enumerate(zip(before, after, strict=True)):
        assert saved["steps"] == loaded["steps"] == ([3, 4] if together else [3 + rank // 2])
        assert len(saved["errors"]) == len(loaded["errors"])
        assert all(map(np.array_equal, saved["errors"], loaded["errors"]))
        assert all(map(np.any, loaded["errors"]))
        assert len(loaded["lines"]) == (rank == 0 if together else rank % 2 == 0), (
            "one rank of each model says so"
        )


def on_pairs(folder: str, resume: bool) -> tuple[bool, list[str]]:
    """A copy of one model on each pair of ranks, of which there may be more on resume: has it errors?"""
    pairs = [dist.new_group([low, low + 1]) for low in range(0, dist.get_world_size(), 2)]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 32), process_group=pairs[dist.get_rank() // 2])
    megatron_patch.attach(model, megatron_patch.CompressionConfig(**LOCO))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(0 if resume else 3):
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with logged() as lines:
        reader = dcp.FileSystemReader(folder) if resume else None
        state = {"loco": megatron_patch.state_dict(model, reader=reader)}
        (dcp.load if resume else dcp.save)(state, checkpoint_id=folder)
        if resume:
            megatron_patch.load_state_dict(model, state["loco"])
    found = any(map(np.any, errors(model)))
    megatron_patch.disable()
    return found, lines


def test_a_copy_of_a_model_that_a_smaller_job_did_not_have_starts_from_zero(pool, tmp_path: Path) -> None:
    pool.run(on_pairs, str(tmp_path), False, world_size=2)
    found = pool.run(on_pairs, str(tmp_path), True, world_size=4)
    assert [errors for errors, _ in found] == [True, True, False, False]
    assert "of another layout" in found[2][1][0]


def frozen_since(how: dict[str, Any], folder: str) -> tuple[list[str], list[np.ndarray]]:
    """A state of parameters of which one was frozen since: no exchange is made that never runs."""
    run(how, folder, True, False)
    model, _ = built(how | {"frozen": (0,)}, LOCO)
    states = megatron_patch.state_dict(model, reader=dcp.FileSystemReader(folder))
    dcp.load({"loco": states}, checkpoint_id=folder)
    with logged() as lines:
        megatron_patch.load_state_dict(model, states)
    before = errors(model)
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-2), 0, 2)
    assert before
    assert not any(map(np.any, before))
    found = [full(p) for p in model.parameters()]
    assert len(errors(model)) == len(model.module.blocks) - 1 if how == DDP else 3
    megatron_patch.disable()
    return lines, found


@pytest.mark.parametrize("how", [FLAT, DDP], ids=str)
def test_a_state_of_parameters_that_are_frozen_now_is_not_taken(
    pool, how: dict[str, Any], tmp_path: Path
) -> None:
    first, *others = pool.run(frozen_since, how, str(tmp_path), world_size=4)
    assert "of another layout" in first[0][0]
    for _, weights in others:
        assert all(map(np.array_equal, weights, first[1])), "every gradient was reduced"


def loaded_again(how: str) -> tuple[list[str], list[Any], list[Any]]:
    """DDP that loads states of other buckets, a damaged one, or one of parameters it does not reduce."""
    states, refused = [], []
    for size in (0.01, 0.003):
        model, optimizer = built(DDP | {"bucket_mb": size}, LOCO)
        steps(model, optimizer, 0, 3)
        states.append(megatron_patch.state_dict(model))
        megatron_patch.disable()
    model, optimizer = built(DDP | ({"double": True} if how == "double" else {}), LOCO)
    if "ignored" in how:
        inner = Model()
        inner.blocks[1].to(torch.float64 if "static" in how else None)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["blocks.0.w0"])
        model = megatron_patch.attach(
            DistributedDataParallel(inner, static_graph="static" in how),
            megatron_patch.CompressionConfig(**LOCO),
        )
    if how == "damaged" and dist.get_rank() == 1:
        states[1] = {key: str(text).replace("steps", "stops") for key, text in states[1].items()}
    for state in states if how != "rolled back" else (states[1], states[1]):
        try:
            megatron_patch.load_state_dict(model, state)
        except megatron_patch.UserError as error:
            refused.append(str(error))
        if how == "rolled back":
            steps(model, optimizer, 3, 5)
    steps(model, optimizer, 5, 8)
    sets = [each.parameters for each in attach.attachment_of(model).exchanged()]
    weights = [p.detach().clone() for p in model.parameters()]["ignored" in how :]
    megatron_patch.disable()
    return refused, [name for names in sets for name in names], weights


@pytest.mark.parametrize(
    "how", ["two loads", "rolled back", "damaged", "double", "ignored", "ignored, static"]
)
def test_ddp_goes_on_after_a_state_that_does_not_fit(pool, how: str) -> None:
    (first, names, weights), (second, _, others) = pool.run(loaded_again, how, world_size=2)
    assert len(names) == len(set(names)), "no parameter is in two exchanges"
    assert all(map(np.array_equal, weights, others))
    assert len(first) == len(second) == (how == "damaged"), "all ranks refuse a state that one cannot read"


def another_model(swapped: bool) -> bool:
    """Two models, of which the second, and then the other one, is not compressed: the errors that it gets."""
    built_with, found = {}, []
    for resume in (False, True):
        models = []
        for number in range(2):
            method = "loco" if (number == 1) == (resume and swapped) else "none"
            model, optimizer = built(DDP, LOCO | {"method": method})
            models.append(model)
            for _ in range(1 - resume):
                steps(model, optimizer, 0, 3)
        if resume:
            megatron_patch.load_state_dict(models, built_with)
            found = [e for model in models if model for e in errors(model)]
        else:
            built_with = megatron_patch.state_dict(models)
        megatron_patch.disable()
    return any(map(np.any, found))


def test_a_state_of_one_model_is_not_given_to_another(pool) -> None:
    assert pool.run(another_model, False, world_size=2) == [True] * 2
    assert pool.run(another_model, True, world_size=2) == [False] * 2
