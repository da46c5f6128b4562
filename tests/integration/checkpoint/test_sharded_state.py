"""megatron_patch.state_dict and load_state_dict: saved and loaded by torch.distributed.checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.checkpoint.test_save_restore import (
    BUCKETS,
    EXACT,
    MOE,
    _build,
    _by_element,
    _mean,
    _states,
    _weights,
    near,
    with_random_errors,
)
from integration.seam_runs import logged

LOCO = {"method": "loco", "bits": 4, "codec": "uniform", "rounding": "stochastic", "reset_interval": 5}
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
    from integration.gpt_model import build
    from integration.recording import weights

    import megatron_patch
    from megatron_patch.integration.attach import chunk_state_of

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
    report = weights(gpt) | {"steps": [chunk_state_of(chunk).steps for chunk in gpt.chunks]}
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


def save(folder: str, parallel: dict[str, Any]) -> Any:
    """In a worker: random errors, saved with the weights; returns the states."""
    from megatron.core import dist_checkpointing

    import megatron_patch

    gpt = _build(parallel, EXACT)
    with_random_errors(gpt, folder)
    dist_checkpointing.save(_weights(gpt), str(Path(folder, "weights")))
    _saved(gpt.chunks, Path(folder, "errors"))
    states = _states(gpt)
    megatron_patch.disable()
    return states


def load(folder: str, parallel: dict[str, Any]) -> Any:
    """In a worker: another model with the weights and errors; its states, counters and log lines."""
    from megatron.core import dist_checkpointing

    import megatron_patch
    from megatron_patch.integration.attach import attachment_of

    gpt = _build(parallel, EXACT)
    state = dist_checkpointing.load(_weights(gpt), str(Path(folder, "weights")))
    for number, chunk in enumerate(gpt.chunks):
        chunk.module.load_state_dict(state[str(number)], strict=False)
    with logged() as lines:
        _loaded(gpt.chunks, Path(folder, "errors"))
    steps = [attachment_of(chunk).state.steps for chunk in gpt.chunks]
    states = _states(gpt)
    megatron_patch.disable()
    return states, steps, lines


@pytest.mark.parametrize(
    ("ranks", "saved_as", "new_ranks", "loaded_as"),
    [
        (4, {}, 2, {}),
        (2, {}, 4, BUCKETS),
        (4, {"ep": 2, **MOE}, 2, MOE),
    ],
    ids=["4 to 2", "2 to 4 in buckets", "experts 4 to 2"],
)
def test_another_number_of_ranks_starts_from_the_mean(
    pool: Any,
    tmp_path: Path,
    ranks: int,
    saved_as: dict[str, Any],
    new_ranks: int,
    loaded_as: dict[str, Any],
) -> None:
    old = _by_element(pool.run(save, str(tmp_path), saved_as, world_size=ranks))["reduce_scatter"]
    reports = pool.run(load, str(tmp_path), loaded_as, world_size=new_ranks)
    assert "senders start from the mean" in reports[0][2][-1]
    assert all(set(steps) == {7} for _, steps, _ in reports)
    compared = 0
    for number, senders in _by_element([states for states, *_ in reports])["reduce_scatter"].items():
        before = old[number]
        if len(before) == len(senders):  # experts, of which as many ranks hold copies
            continue
        owed = _mean(itertools.chain.from_iterable(before.values())) * len(before)
        for errors in senders.values():
            assert near(errors, owed / len(senders), 1e-4, 1e-5), number
            compared += 1
    assert compared > 3_000


# --- what is refused, and said ---------------------------------------------------------------------------


def refusals(folder: str) -> dict[str, str]:
    import torch.distributed.checkpoint as dcp
    from integration.tiny_model import build

    import megatron_patch

    tiny = build()
    found = {"detached": str(megatron_patch.state_dict(tiny.ddp))}
    megatron_patch.load_state_dict(tiny.ddp, {})
    megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(**ROTATED))
    dcp.save({"other": 1}, checkpoint_id=folder)
    state = megatron_patch.state_dict(tiny.ddp)
    half = build(dtypes=("float16",), grad_reduce_in_fp32=False)
    half.ddp.config.fp16 = True
    megatron_patch.attach(half.ddp, megatron_patch.CompressionConfig(**ROTATED))
    asked = {
        "empty": lambda: megatron_patch.load_state_dict(tiny.ddp, {}),
        "torn": lambda: megatron_patch.load_state_dict(tiny.ddp, state | {"megatron_loco_manifest": "{"}),
        "other": lambda: megatron_patch.state_dict(tiny.ddp, None, dcp.FileSystemReader(folder)),
        "fp16": lambda: megatron_patch.state_dict(half.ddp),
        "parts": lambda: megatron_patch.load_state_dict(
            tiny.ddp, {"megatron_loco_manifest": state["megatron_loco_manifest"]}
        ),
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
            "parts": "state_dict(model, reader=...)",
        }.items():
            assert words in told[name]
            assert "\n" not in told[name]


def checkpoints_of_others(folder: str) -> list[list[str]]:
    """In a worker: what is logged as a framework's own code saves, before a step, after one, again, and once
    the states were asked for."""
    import torch
    from integration.gpt_model import build
    from megatron.core import dist_checkpointing

    import megatron_patch
    from megatron_patch.integration.checkpoint import hooks, sharded_state

    hooks._noticed = sharded_state.asked_for = False
    gpt = build()
    stock = dist_checkpointing.save
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**ROTATED))
    said = []
    for place in range(4):
        if torch.distributed.get_rank() == 0:
            Path(folder, str(place)).mkdir(parents=True)
        torch.distributed.barrier()
        with logged() as lines:
            if place == 3:
                hooks._noticed = False
                megatron_patch.state_dict(gpt.chunks)
            dist_checkpointing.save(_weights(gpt), str(Path(folder, str(place))))
        said.append(lines)
        gpt.backward(place)
        gpt.update()
    megatron_patch.disable()
    assert dist_checkpointing.save is stock
    return said


def test_a_checkpoint_without_the_states_is_noticed_once(pool: Any, tmp_path: Path) -> None:
    first, other = pool.run(checkpoints_of_others, str(tmp_path), world_size=2)
    assert [len(lines) for lines in first] == [0, 1, 0, 0]
    assert [len(lines) for lines in other] == [0, 0, 0, 0]
    assert "megatron_patch.state_dict(model)" in first[1][0]
