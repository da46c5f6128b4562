"""Megatron's engine goes on from a checkpoint with error states as if it had never stopped.

NAME trains and saves in the middle and at the end; NAME-resumed loads what was saved in the middle.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from with_megatron.checkpoint.whole_checkpoints import states_of
from workflows.engine_runs import EXPERTS, OVERLAP, PARALLEL, UNTIED, Run, engine

LOCO = ["--compression-method", "loco", "--compression-bits", "4"]
ONEBIT = ["--compression-method", "onebit_adam", "--compression-warmup-steps"]
EXACT = ["--compression-weight-gather", "exact"]
DISTRIBUTED = ("--use-distributed-optimizer",)
REPLICATED = [*UNTIED, "--overlap-grad-reduce"]
GATHERED = [*OVERLAP, "--overlap-param-gather"]
TWO_INSTANCES = [*OVERLAP, "--num-distributed-optimizer-instances", "2"]
BETWEEN = [*GATHERED, "--num-distributed-optimizer-instances", "2"]
# Where the run saves, after 4 steps, the exchange of the first of two turns is under way.
OUTER = ["--compression-outer-interval", "6", "--compression-outer-delay", "3"]
OUTER += ["--compression-outer-momentum", "0.9"]
EXPERTS_BF16 = [*EXPERTS, "--bf16", "--overlap-grad-reduce"]
MUON = ["--optimizer", "muon", "--bf16"]
FP16 = [*UNTIED, "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "3"]
# The checkpoint in the middle is one that Megatron keeps in a folder of its own.
APART = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "4"]

CASES: dict[str, tuple[Run, int]] = {
    "dense": (Run(OVERLAP, [*LOCO, "--compression-reset-interval", "5"]), 12),
    "dense-fp16": (Run([*FP16, *APART], LOCO), 8),
    "experts-bf16-async": (Run([*EXPERTS_BF16, "--async-save"], LOCO, ranks=4), 8),
    "parallel": (Run(PARALLEL, ["--compression-method", "error_feedback"], ranks=8), 8),
    "two-instances": (Run(TWO_INSTANCES, LOCO, ranks=4), 8),
    "outer-steps": (Run([*BETWEEN, "--bf16"], [*LOCO, *EXACT, *OUTER], ranks=4), 8),
    # With the distributed optimizer Megatron cannot load this format without Apex or Transformer Engine.
    "sgd": (Run([*REPLICATED, "--optimizer", "sgd", "--ckpt-format", "torch"], LOCO, without=DISTRIBUTED), 8),
    "onebit": (Run(OVERLAP, [*ONEBIT, "2"]), 8),
    "onebit-replicated-bf16": (Run([*REPLICATED, "--bf16"], [*ONEBIT, "6"], without=DISTRIBUTED), 8),
    "exact-gather": (Run([*GATHERED, "--bf16"], [*LOCO, *EXACT]), 8),
    "muon": (Run([*GATHERED, *MUON], [*LOCO, *EXACT]), 8),
}
SLOW = ("parallel", "two-instances", "onebit")
"""Cases whose parts the others and the tests on the pool have too: `make test-slow` runs them."""
SWITCHES = {"to-stock": None, "finetuned": [*LOCO, "--finetune"]}


def resumed(cases: Iterable[str]) -> dict[str, Run]:
    """For each case a run that saves in the middle, and one that goes on from there."""
    runs = {}
    for name in cases:
        run, steps = CASES[name]
        every = str(steps if "--non-persistent-save-interval" in run.flags else steps // 2)
        flags = [*run.flags, "--train-iters", str(steps), "--save-interval", every]
        whole = [*flags, "--save", f"{{out}}/{name}/checkpoints"]
        again = [*flags, "--save", f"{{out}}/{name}-resumed/checkpoints"]
        again += ["--load", f"{{out}}/{name}/checkpoints", "--ckpt-step", str(steps // 2)]
        runs[name] = dataclasses.replace(run, flags=whole)
        runs[f"{name}-resumed"] = dataclasses.replace(run, flags=again, after=name)
    return runs


def _runs() -> dict[str, Run]:
    runs = resumed(name for name in CASES if name not in SLOW)
    source = ["--load", "{out}/dense/checkpoints", "--ckpt-step", "6", "--train-iters", "12"]
    source += ["--exit-interval", "8"]
    for name, ours in SWITCHES.items():
        runs[name] = Run([*OVERLAP, *source], ours, after="dense")
    runs["to-4-ranks"] = Run([*OVERLAP, *source], LOCO, ranks=4, after="dense")
    source = [*GATHERED, "--bf16", "--load", "{out}/exact-gather/checkpoints", "--ckpt-step", "4"]
    source += ["--train-iters", "8", "--eval-interval", "2", "--save-interval", "8"]
    for name, ours in (("exact", [*LOCO, *EXACT]), ("stock", LOCO)):
        four = [*source, "--save", f"{{out}}/{name}-4/checkpoints"]
        runs[f"{name}-4"] = Run(four, ours, ranks=4, after="exact-gather")
    return runs


RUNS = _runs()

SAME = ("loss", "grad_norm", "gradient_wire_bytes", "compression_snr_db", "compensation_norm_ratio")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs but the slow ones."""
    return engine(tmp_path_factory.mktemp("resume"), RUNS)


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of its slow cases."""
    return engine(tmp_path_factory.mktemp("slow-resume"), resumed(SLOW))


def _log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))


def _records(folder: Path) -> dict[int, dict[str, Any]]:
    assert set((folder / "exit").read_text().split()) == {"0"}, _log(folder)[-3000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def _content(checkpoint: Path) -> dict[str, Any]:
    """Every tensor that Megatron saved: weights, Adam's moments, the tracker's random states.

    Not torch's own random state: a DataLoader draws from it as it begins, so on CPU, where it stands for
    CUDA's as well, it is not what it was. It matters to dropout alone.
    """
    if not (checkpoint / "metadata.json").exists():  # the legacy format
        return {
            f"{path.parent.name}{name}": value
            for path in sorted(checkpoint.glob("mp_rank_*/*.pt"))
            for name, value in _tensors(torch.load(path, weights_only=False))
        }
    found: dict[str, Any] = {}
    reader = FileSystemReader(checkpoint)
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(_tensors(found))


def _tensors(value: Any, name: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        if not name.endswith(("torch_rng_state", "cuda_rng_state")):
            yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from _tensors(item, f"{name}.{key}")


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_a_resumed_run_is_the_undisturbed_one(runs: Path, case: str) -> None:
    _compare(runs, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_a_resumed_run_is_the_undisturbed_one_in_more_cases(slow_runs: Path, case: str) -> None:
    _compare(slow_runs, case)


def _compare(runs: Path, case: str) -> None:
    """Losses, gradient norms, weights, moments and error states, bit for bit."""
    steps = CASES[case][1]
    whole, resumed = _records(runs / case), _records(runs / f"{case}-resumed")
    assert list(resumed) == list(range(steps // 2 + 1, steps + 1))
    for step, record in resumed.items():
        for name in SAME:
            assert record[name] == whole[step][name], (step, name)
    ends = [runs / name / "checkpoints" / f"iter_{steps:07d}" for name in (case, f"{case}-resumed")]
    before, after = (_content(end) for end in ends)
    assert before.keys() == after.keys()
    assert sum(tensor.numel() for tensor in before.values() if isinstance(tensor, torch.Tensor)) > 100_000
    for name, tensor in before.items():
        if "megatron_loco_outer" in name:  # What torch.save writes of equal tensors may differ.
            _compare_outer(tensor, after[name])
        else:
            assert torch.equal(tensor, after[name]), name
    first, second = (states_of(end) for end in ends)
    assert first.keys() == second.keys()
    assert any(data is not None and data.any() for _, data in first.values())
    for rank, (manifest, data) in first.items():
        again, same = second[rank]
        assert manifest == again
        assert data is same is None or torch.equal(data, same)
    assert "restored exactly" in _log(runs / f"{case}-resumed")


def _compare_outer(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    (layout, before), (same, after) = (
        torch.load(io.BytesIO(data[:-4].numpy().tobytes()))[0] for data in (mine, theirs)
    )
    assert layout == same
    assert before.keys() == after.keys()
    assert {"velocity", "codes", "exp_avg"} <= {name.rpartition(".")[2] for name in before}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_what_is_restored_matters(runs: Path) -> None:
    """Without the error states, the runs above would not agree."""
    whole, without = _records(runs / "dense"), _records(runs / "finetuned")
    assert "error states" not in _log(runs / "finetuned")
    assert without[2]["loss"] != whole[8]["loss"]
    assert [without[step]["compressed"] for step in (1, 2, 3)] == [False, False, True]  # a start of its own
    assert without[3]["compensation_norm_ratio"] == 0


def test_an_outer_step_is_made_before_a_checkpoint(runs: Path) -> None:
    line = "an outer step before the checkpoint, 4 optimizer steps after the last one"
    assert line in _log(runs / "outer-steps"), "of 6, an interval"


def test_saving_disturbs_nothing(runs: Path) -> None:
    states = states_of(runs / "dense" / "checkpoints" / "iter_0000006")
    assert {part["steps"] for manifest, _ in states.values() for part in manifest["sessions"]} == {6}


def test_another_number_of_ranks_goes_on_from_a_checkpoint(runs: Path) -> None:
    assert list(_records(runs / "to-4-ranks")) == [7, 8]
    said = _log(runs / "to-4-ranks")
    assert "step 6: errors start from zero: the checkpoint is of another layout (data 2 -> 4)" in said


def test_exact_weight_gathers_change_nothing_after_a_checkpoint_of_another_layout(runs: Path) -> None:
    """Two ranks' checkpoint, continued by four: with exact gathers as with Megatron's own."""
    exact, stock = (_records(runs / f"{name}-4") for name in ("exact", "stock"))
    assert list(exact) == list(stock) == [5, 6, 7, 8]
    for step, record in exact.items():
        assert all(record[name] == stock[step][name] for name in SAME), step
    # Nothing is gathered in a first step, and in full after an evaluation: after step 6.
    bits = [[record["weight_wire_bits_per_element"] for record in one.values()] for one in (exact, stock)]
    assert bits[1] == [0, 16, 16, 16]
    assert bits[0][0] == 0
    assert max(bits[0][1], bits[0][3]) < 12
    ends = [_content(runs / f"{name}-4" / "checkpoints" / "iter_0000008") for name in ("exact", "stock")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_stock_megatron_loads_a_checkpoint_of_ours(runs: Path) -> None:
    assert set((runs / "to-stock" / "exit").read_text().split()) == {"0"}, _log(runs / "to-stock")[-3000:]
    log = _log(runs / "to-stock")
    assert "successfully loaded checkpoint" in log
    assert "megatron-loco" not in log


def test_the_error_state_costs_a_byte_an_element(runs: Path) -> None:
    """At most 1.1 bytes for every gradient element of every data-parallel rank."""
    states = states_of(runs / "dense" / "checkpoints" / "iter_0000006")
    assert len(states) == 2
    for manifest, data in states.values():
        shapes = [shape for name, (_, shape, _) in manifest["tensors"].items() if name.endswith(".codes")]
        elements = sum(map(math.prod, shapes))
        assert elements > 100_000
        assert data.numel() <= 1.1 * elements
