"""megatron_patch.state_dict and load_state_dict: saved and loaded by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from with_megatron.checkpoint.whole_checkpoints import (
    attached,
    interrupted,
    load_apart,
    save_apart,
    with_random_errors,
)
from with_megatron.checkpoint.whole_checkpoints import errors_of as errors_of_gpt
from with_megatron.seam_runs import built, errors_of, logged, refusal
from with_megatron.tiny_model import build

import megatron_patch

MOE = {"experts": 4, "layers": 1}
LOCO = {"method": "loco", "bits": 4, "start_step": 0, "codec": "uniform", "reset_interval": 5}
ROTATED = {"method": "loco", "bits": 4, "start_step": 0}
FP16 = {
    "dtype": "fp16",
    "ddp": {"grad_reduce_in_fp32": False},
    "optimizer": {"initial_loss_scale": 2.0**10, "loss_scale_window": 3},
}


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        (4, {"ep": 2, **MOE, "dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}, ROTATED),
        (2, {"ddp": {"use_distributed_optimizer": False}}, LOCO),
        (2, FP16, ROTATED),
    ],
    ids=["experts", "replicated", "fp16"],
)
def test_a_resumed_run_is_the_undisturbed_one(
    pool: Any, tmp_path: Path, ranks: int, model: dict[str, Any], options: dict[str, Any]
) -> None:
    runs = {
        how: pool.run(interrupted, str(tmp_path / how), model, options, how, world_size=ranks)
        for how in ("whole", "by reader", "by template", "forgotten")
    }
    differs = False
    for rank, whole in enumerate(runs["whole"]):
        for name, value in whole.items():
            for how in ("by reader", "by template"):
                assert np.array_equal(value, runs[how][rank][name]), (how, name)
            differs |= not np.array_equal(value, runs["forgotten"][rank][name])
    assert differs, "the comparison can fail"


def save_errors(folder: str, parallel: dict[str, Any]) -> None:
    """In a worker: random errors, saved."""
    gpt, _ = attached(parallel, {})
    with_random_errors(gpt)
    save_apart(gpt.chunks, Path(folder, "errors"))


def load_errors(folder: str, parallel: dict[str, Any]) -> tuple[bool, int, list[str]]:
    """In a worker: another model with the errors; whether there are any, its steps and log lines."""
    gpt, session = attached(parallel, {})
    with logged() as lines:
        load_apart(gpt.chunks, Path(folder, "errors"))
    return any(error.any() for error in errors_of_gpt(gpt)), session.ledger.steps, lines


@pytest.mark.parametrize(
    ("saved_as", "ranks", "loaded_as", "layout"),
    [({}, 2, {}, "layout (data 4 -> 2)"), ({"ep": 2, **MOE}, 4, MOE, "layout (expert 2 -> 1)")],
    ids=["ranks", "experts"],
)
def test_in_another_layout_errors_start_from_zero(
    pool: Any, tmp_path: Path, saved_as: dict[str, Any], ranks: int, loaded_as: dict[str, Any], layout: str
) -> None:
    pool.run(save_errors, str(tmp_path), saved_as, world_size=4)
    reports = pool.run(load_errors, str(tmp_path), loaded_as, world_size=ranks)
    line = f"INFO: megatron-loco: step 7: errors start from zero: the checkpoint is of another {layout}"
    assert reports[0][2][-1] == line
    assert all((errors, steps) == (False, 7) for errors, steps, _ in reports)


def without_errors(folder: str) -> tuple[bool, int, list[str]]:
    """In a worker: whether a state has bytes, and the steps and lines of a model that loads it."""
    tiny, _ = built({}, {"method": "naive"})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    state = megatron_patch.state_dict(tiny.ddp)
    dcp.save({"compression": state}, checkpoint_id=folder)
    megatron_patch.disable()
    again, session = built({}, {"method": "naive"})
    with logged() as lines:
        load_apart(again.ddp, Path(folder))
    return len(state) > 1, session.ledger.steps, lines


def test_a_state_without_errors_has_the_counters(pool: Any, tmp_path: Path) -> None:
    for rank, (has_bytes, steps, lines) in enumerate(pool.run(without_errors, str(tmp_path), world_size=2)):
        assert (has_bytes, steps) == (False, 3)
        assert any("this method keeps no errors" in said for said in lines) == (rank == 0)


def refusals(folder: str) -> dict[str, str]:
    """In a worker: by what is expected of it, what is said."""
    tiny = build()
    found = {"detached": str(megatron_patch.state_dict(tiny.ddp))}
    megatron_patch.load_state_dict(tiny.ddp, {})
    megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(**ROTATED))
    dcp.save({"other": 1}, checkpoint_id=folder)
    state = megatron_patch.state_dict(tiny.ddp)
    (manifest,) = (key for key in state if key.endswith(".manifest"))
    half = build(dtypes=("float16",), grad_reduce_in_fp32=False)
    half.ddp.config.fp16 = True
    megatron_patch.attach(half.ddp, megatron_patch.CompressionConfig(**ROTATED))
    state_dict, load = megatron_patch.state_dict, megatron_patch.load_state_dict
    return found | {
        "it has no manifest": refusal(load, tiny.ddp, {}),
        "cannot be read": refusal(load, tiny.ddp, state | {manifest: "{"}),
        "holds no state": refusal(state_dict, tiny.ddp, None, dcp.FileSystemReader(folder)),
        "pass the optimizer": refusal(state_dict, half.ddp),
        "no tensor": refusal(load, tiny.ddp, {manifest: state[manifest]}),
    }


def test_what_cannot_be_loaded_is_one_line(pool: Any, tmp_path: Path) -> None:
    for told in pool.run(refusals, str(tmp_path / "dcp"), world_size=2):
        assert told.pop("detached") == "{}"
        for words, line in told.items():
            assert words in line
            assert "\n" not in line


def saved_by_another_loop(folder: str, passed: bool) -> dict[str, Any]:
    """5 whole steps of a loop whose optimizer nothing can see, saved and loaded in a new one.

    A Megatron optimizer that never stepped may be `passed` all the same.
    """
    model = {"ddp": {"use_distributed_optimizer": False}}
    tiny, state = built(model, {"bits": 4})
    for step in range(5):
        tiny.exchange(tiny.random_gradients(step))
        with torch.no_grad():
            for parameter in tiny.parameters:
                parameter.sub_(1e-3 * parameter.main_grad)
    save_apart(tiny.ddp, Path(folder), tiny.optimizer if passed else None)
    before, steps = errors_of(state), (state.ledger.steps, state.ledger.steps_seen)
    megatron_patch.disable()

    again, loaded = built(model, {"bits": 4})
    load_apart(again.ddp, Path(folder), again.optimizer if passed else None)
    same = all(torch.equal(a, b) and bool(a.any()) for a, b in zip(before, errors_of(loaded), strict=True))
    counted = loaded.ledger.steps, loaded.ledger.steps_seen
    tiny.exchange(tiny.random_gradients(5))
    return {"steps": steps, "loaded": counted, "same": same}


@pytest.mark.parametrize("passed", [False, True])
def test_a_loop_with_another_optimizer_keeps_its_errors(pool: Any, tmp_path: Path, passed: bool) -> None:
    for found in pool.run(saved_by_another_loop, str(tmp_path), passed, world_size=2):
        assert found == {"steps": (5, 5), "loaded": (5, 5), "same": True}


def two_models(folder: str) -> dict[str, Any]:
    """A policy's and a critic's errors in one checkpoint, each loaded by its name."""
    names = ("policy", "critic")
    old = {}
    models = {}
    for number, name in enumerate(names):
        tiny, state = built({"seed": number}, {"bits": 4})
        for step in range(3):
            tiny.step(tiny.random_gradients(10 * number + step))
        models[name], old[name] = tiny, [error.clone() for error in errors_of(state)]
    saved = {name: {"compression": megatron_patch.state_dict(models[name].ddp)} for name in names}
    dcp.save(saved, checkpoint_id=folder)
    megatron_patch.disable()
    reader = dcp.FileSystemReader(folder)
    found: dict[str, Any] = {}
    for name in names:
        tiny, state = built({}, {"bits": 4})
        for wrong in (None, "value.compression"):
            try:
                megatron_patch.state_dict(tiny.ddp, reader=reader, path=wrong)
            except megatron_patch.UserError as error:
                found[str(wrong)] = str(error)
        room = megatron_patch.state_dict(tiny.ddp, reader=reader, path=f"{name}.compression")
        dcp.load({name: {"compression": room}}, checkpoint_id=folder)
        megatron_patch.load_state_dict(tiny.ddp, room)
        pairs = zip(old[name], errors_of(state), strict=True)
        found[name] = all(torch.equal(a, b) and bool(a.any()) for a, b in pairs)
    found["differ"] = any(not torch.equal(a, b) for a, b in zip(*old.values(), strict=True))
    return found


def test_two_models_states_in_one_checkpoint_are_told_apart(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(two_models, str(tmp_path), world_size=2):
        assert (found["policy"], found["critic"], found["differ"]) == (True, True, True)
        assert found["None"].startswith("the checkpoint holds the states of several models, at ")
        for line in (found["None"], found["value.compression"]):
            assert "'critic.compression', 'policy.compression'" in line
