"""megatron_patch.state_dict and load_state_dict: saved and loaded by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from with_megatron.checkpoint.test_save_restore import BUCKETS, MOE, _build, errors_of, with_random_errors
from with_megatron.seam_runs import logged

LOCO = {
    "method": "loco",
    "bits": 4,
    "start_step": 0,
    "codec": "uniform",
    "reset_interval": 5,
}
ROTATED = {"method": "loco", "bits": 4, "start_step": 0}
FP16 = {
    "dtype": "fp16",
    "ddp": {"grad_reduce_in_fp32": False},
    "optimizer": {"initial_loss_scale": 2.0**10, "loss_scale_window": 3},
}


def _saved(model: Any, folder: Path, optimizer: Any = None) -> None:
    import torch.distributed.checkpoint as dcp

    import megatron_patch

    dcp.save({"compression": megatron_patch.state_dict(model, optimizer)}, checkpoint_id=folder)


def _loaded(model: Any, folder: Path, optimizer: Any = None, any_layout: bool = True) -> None:
    import torch.distributed.checkpoint as dcp

    import megatron_patch

    reader = dcp.FileSystemReader(folder)
    state = megatron_patch.state_dict(model, optimizer, reader if any_layout else None)
    dcp.load({"compression": state}, storage_reader=reader)
    megatron_patch.load_state_dict(model, state, optimizer)


# --- the same layout -------------------------------------------------------------------------------------


def interrupted(folder: str, model: dict[str, Any], options: dict[str, Any], how: str) -> dict[str, Any]:
    """In a worker: 8 steps' weights; `how` says what happens to the errors after the fourth."""
    from with_megatron.gpt_model import build
    from with_megatron.recording import weights

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    gpt = build(**model)
    config = megatron_patch.CompressionConfig(**options)
    optimizer = gpt.optimizer if model.get("dtype") == "fp16" else None
    megatron_patch.attach(gpt.chunks, config)
    for step in range(8):
        if step == 4 and how != "whole":
            _saved(gpt.chunks, Path(folder), optimizer)
            megatron_patch.disable()
            megatron_patch.attach(gpt.chunks, config)
            if how != "forgotten":
                _loaded(gpt.chunks, Path(folder), optimizer, any_layout=how == "by reader")
        gpt.backward(step)
        gpt.update()
    gpt.gather()
    report = weights(gpt) | {"steps": [session_of(chunk).ledger.steps for chunk in gpt.chunks]}
    megatron_patch.disable()
    return report


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        pytest.param(4, {}, LOCO, marks=pytest.mark.slow),  # the experts' run has dense parameters too
        (4, {"ep": 2, **MOE, "dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}, ROTATED),
        (2, {"ddp": {"use_distributed_optimizer": False}}, LOCO),
        (2, FP16, ROTATED),
    ],
    ids=["dense", "experts", "replicated", "fp16"],
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


# --- another layout --------------------------------------------------------------------------------------


def save(folder: str, parallel: dict[str, Any]) -> None:
    """In a worker: random errors, saved."""
    import megatron_patch

    gpt = _build(parallel, {})
    with_random_errors(gpt)
    _saved(gpt.chunks, Path(folder, "errors"))
    megatron_patch.disable()


def load(folder: str, parallel: dict[str, Any]) -> tuple[bool, list[int], list[str]]:
    """In a worker: another model with the errors; whether there are any, its counters and log lines."""
    import megatron_patch
    from megatron_patch.megatron.attach import attachment_of

    gpt = _build(parallel, {})
    with logged() as lines:
        _loaded(gpt.chunks, Path(folder, "errors"))
    steps = [attachment_of(chunk).session.ledger.steps for chunk in gpt.chunks]
    found = any(error.any() for error in errors_of(gpt)), steps, lines
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("ranks", "saved_as", "new_ranks", "loaded_as", "layout"),
    [
        (4, {}, 2, {}, "layout (data 4 -> 2)"),
        (2, {}, 4, {}, "layout (data 2 -> 4)"),
        (4, {"ep": 2, **MOE}, 4, MOE, "layout (expert 2 -> 1)"),
        (2, {}, 2, BUCKETS, "layout"),
    ],
    ids=["4 to 2", "2 to 4", "experts", "buckets"],
)
def test_in_another_layout_errors_start_from_zero(
    pool: Any,
    tmp_path: Path,
    ranks: int,
    saved_as: dict[str, Any],
    new_ranks: int,
    loaded_as: dict[str, Any],
    layout: str,
) -> None:
    pool.run(save, str(tmp_path), saved_as, world_size=ranks)
    reports = pool.run(load, str(tmp_path), loaded_as, world_size=new_ranks)
    line = f"INFO: megatron-loco: step 7: errors start from zero: the checkpoint is of another {layout}"
    assert reports[0][2][-1] == line
    assert all((errors, steps) == (False, [7]) for errors, steps, _ in reports)


def without_errors(folder: str, options: dict[str, Any]) -> tuple[bool, int, list[str]]:
    """In a worker: whether a state has bytes, and the steps and lines of a model that loads it."""
    import torch.distributed.checkpoint as dcp
    from with_megatron.seam_runs import built

    import megatron_patch

    tiny, _ = built({}, options)
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    state = megatron_patch.state_dict(tiny.ddp)
    dcp.save({"compression": state}, checkpoint_id=folder)
    megatron_patch.disable()
    again, session = built({}, options)
    with logged() as lines:
        _loaded(again.ddp, Path(folder))
    found = len(state) > 1, session.ledger.steps, lines
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("options", "line"),
    [({"save_error": False}, "they were not saved"), ({"method": "naive"}, "this method keeps no errors")],
    ids=["not saved", "none"],
)
def test_a_state_without_errors_has_the_counters(
    pool: Any, tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    for rank, (has_bytes, steps, lines) in enumerate(
        pool.run(without_errors, str(tmp_path), options, world_size=2)
    ):
        assert (has_bytes, steps) == (False, 3)
        assert any(line in said for said in lines) == (rank == 0)


# --- what is refused, and said ---------------------------------------------------------------------------


def refusals(folder: str) -> dict[str, str]:
    import torch.distributed.checkpoint as dcp
    from with_megatron.tiny_model import build

    import megatron_patch

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
    asked = {
        "empty": lambda: megatron_patch.load_state_dict(tiny.ddp, {}),
        "torn": lambda: megatron_patch.load_state_dict(tiny.ddp, state | {manifest: "{"}),
        "other": lambda: megatron_patch.state_dict(tiny.ddp, None, dcp.FileSystemReader(folder)),
        "fp16": lambda: megatron_patch.state_dict(half.ddp),
        "parts": lambda: megatron_patch.load_state_dict(tiny.ddp, {manifest: state[manifest]}),
    }
    for name, call in asked.items():
        try:
            call()
        except megatron_patch.UserError as error:
            found[name] = str(error)
    megatron_patch.disable()
    return found


def test_what_cannot_be_loaded_is_one_line(pool: Any, tmp_path: Path) -> None:
    for told in pool.run(refusals, str(tmp_path / "dcp"), world_size=2):
        assert told["detached"] == "{}"
        for name, words in {
            "empty": "no state of megatron_patch.state_dict",
            "torn": "cannot be read",
            "other": "holds no state",
            "fp16": "pass the optimizer",
            "parts": "no tensor",
        }.items():
            assert words in told[name]
            assert "\n" not in told[name]


def saved_by_torch_s_loop(folder: str, optimizer: str) -> dict[str, Any]:
    """5 whole steps of a loop whose optimizer is not Megatron's, saved and loaded in a new one."""
    import torch
    import torch.distributed.checkpoint as dcp
    from with_megatron.seam_runs import built, errors_of

    import megatron_patch

    model = {"ddp": {"use_distributed_optimizer": False}}

    def update(tiny: Any) -> None:
        if optimizer == "torch":
            torch.optim.SGD(tiny.parameters, lr=1e-3).step()
        else:  # of neither: nothing can tell when it steps
            with torch.no_grad():
                for parameter in tiny.parameters:
                    parameter.sub_(1e-3 * parameter.main_grad)

    tiny, state = built(model, {"bits": 4})
    for parameter in tiny.parameters:
        parameter.grad = parameter.main_grad
    for step in range(5):
        tiny.exchange(tiny.random_gradients(step))
        update(tiny)
    dcp.save({"compression": megatron_patch.state_dict(tiny.ddp)}, checkpoint_id=folder)
    before, steps = (
        [error.clone() for error in errors_of(state)],
        (state.ledger.steps, state.ledger.steps_seen),
    )
    megatron_patch.disable()

    again, loaded = built(model, {"bits": 4})
    room = megatron_patch.state_dict(again.ddp, reader=dcp.FileSystemReader(folder))
    dcp.load({"compression": room}, checkpoint_id=folder)
    megatron_patch.load_state_dict(again.ddp, room)
    same = all(torch.equal(a, b) and bool(a.any()) for a, b in zip(before, errors_of(loaded), strict=True))
    counted = loaded.ledger.steps, loaded.ledger.steps_seen
    tiny.exchange(tiny.random_gradients(5))
    megatron_patch.disable()
    return {"steps": steps, "loaded": counted, "same": same}


@pytest.mark.parametrize("optimizer", ["torch", "unseen"])
def test_a_loop_with_another_optimizer_keeps_its_errors(pool: Any, tmp_path: Path, optimizer: str) -> None:
    for found in pool.run(saved_by_torch_s_loop, str(tmp_path), optimizer, world_size=2):
        assert found == {"steps": (5, 5), "loaded": (5, 5), "same": True}


def loaded_with_another_beta(folder: str, old: float, new: float) -> list[tuple[float, float]]:
    import torch.distributed.checkpoint as dcp
    from with_megatron.seam_runs import built, errors_of

    import megatron_patch

    def norms(state: Any) -> list[float]:
        return [float(error.double().norm()) for error in errors_of(state)]

    tiny, state = built({}, {"error_beta": old, "error_dtype": "fp32"})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    dcp.save({"c": megatron_patch.state_dict(tiny.ddp, tiny.optimizer)}, checkpoint_id=folder)
    before = norms(state)
    megatron_patch.disable()
    again, loaded = built({}, {"error_beta": new, "error_dtype": "fp32"})
    room = megatron_patch.state_dict(again.ddp, again.optimizer)
    dcp.load({"c": room}, checkpoint_id=folder)
    megatron_patch.load_state_dict(again.ddp, room, again.optimizer)
    after = norms(loaded)
    megatron_patch.disable()
    return list(zip(before, after, strict=True))


@pytest.mark.parametrize(("old", "new"), [(0.8, 0.5), (0.5, 0.9), (0.8, 0.8)])
def test_what_is_pending_stays_the_same_under_another_beta(
    pool: Any, tmp_path: Path, old: float, new: float
) -> None:
    """e is delivered again and again, each time beta of it: e / (1 - beta) in all (docs/numerics.md)."""
    for norms in pool.run(loaded_with_another_beta, str(tmp_path), old, new):
        for before, after in norms:
            assert before > 0
            assert after / (1 - new) == pytest.approx(before / (1 - old), rel=1e-5)


def two_models(folder: str) -> dict[str, Any]:
    """A policy's and a critic's errors in one checkpoint, each loaded by its name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from with_megatron.seam_runs import built, errors_of

    import megatron_patch

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
    megatron_patch.disable()
    return found


def test_two_models_states_in_one_checkpoint_are_told_apart(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(two_models, str(tmp_path), world_size=2):
        assert (found["policy"], found["critic"], found["differ"]) == (True, True, True)
        assert found["None"].startswith("the checkpoint holds the states of several models, at ")
        for line in (found["None"], found["value.compression"]):
            assert "'critic.compression', 'policy.compression'" in line
