"""Rates that `python -m benchmarks.gpu` measured take the place of the planner's, for that GPU alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.workflows.cli import main
from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.constants import CONSTANTS, GPUS, exact_bits

EXAMPLE = constants.RESULTS / "of_a_cpu.json"
H100 = {"device": "NVIDIA H100 80GB HBM3", "gpus": 1}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Results files of a test's own."""
    monkeypatch.setattr(constants, "RESULTS", tmp_path)
    return tmp_path


def put(folder: Path, name: str, rates: dict[str, Any], **changes: Any) -> None:
    """The example with other rates and another device."""
    results = json.loads(EXAMPLE.read_text(encoding="utf-8")) | changes
    of_rates = results["parts"]["rates"]["rates"]
    for what, rate in rates.items():
        of_rates[what] = of_rates[what] | rate if isinstance(rate, dict) else rate
    (folder / name).write_text(json.dumps(results), encoding="utf-8")


RATES = {
    "4 bits, levels, fp32": {"compress": 3e11, "decompress of 8": 4e12},
    "weights, 0.00143": {"encode": 1e11, "decode": 2e11, "sums": 1e12},
    "adam_bytes": 2.68e12,
}


def test_what_measured_nothing_on_a_gpu_changes_nothing(folder: Path) -> None:
    shutil.copy(EXAMPLE, folder)
    assert constants.newest(folder) == {}
    assert constants.numbers_of(constants.GPUS["H100"]) == constants.CONSTANTS
    constants.newest.cache_clear()
    put(folder, "a.json", {}, **H100, date="2027-01-01", parts={"rates": {"rates": {"adam_bytes": 2e12}}})
    numbers = constants.numbers_of(constants.GPUS["H100"])
    assert [name for name, one in numbers.items() if one != constants.CONSTANTS[name]] == ["memory_share"]


def test_what_was_measured_last_is_taken_and_says_so(folder: Path) -> None:
    put(folder, "older.json", {"adam_bytes": 1e12}, **H100, date="2027-01-01")
    put(folder, "another.json", {}, device="NVIDIA GB999", gpus=4, date="2027-01-15")
    put(folder, "newer.json", RATES, **H100, date="2027-02-01")
    assert list(constants.newest(folder)) == ["NVIDIA GB999", "H100"]
    numbers = constants.numbers_of(constants.GPUS["H100"])
    changed = {name for name, number in numbers.items() if number != constants.CONSTANTS[name]}
    assert changed == {*constants.RATES, "memory_share"}
    assert {numbers[name].kind for name in changed} == {"measured"}
    assert numbers["compress"].value == 3e11
    assert numbers["decompress"].value == 4e12
    assert [numbers[f"weight_{what}"].value for what in ("encode", "decode", "sums")] == [1e11, 2e11, 1e12]
    assert numbers["memory_share"].value == pytest.approx(0.8)
    source = "NVIDIA H100 80GB HBM3, 2027-02-01: benchmarks/gpu/results/newer.json"
    assert numbers["compress"].source == source
    # Another GPU has its own data sheet, and an H100's rates by arithmetic.
    a100 = constants.numbers_of(constants.GPUS["A100"])
    assert a100["memory_share"] == constants.CONSTANTS["memory_share"]
    assert a100["compress"].kind == "computed"
    lanes = constants.GPUS["A100"].lanes / constants.GPUS["H100"].lanes
    assert a100["compress"].value == pytest.approx(constants.CONSTANTS["compress"].value * lanes)


def test_plan_computes_with_them_and_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {name: dict.fromkeys(rates, 1e9) for name, rates in RATES.items() if isinstance(rates, dict)}
    seconds = []
    for measured in (False, True):
        if measured:
            put(folder, "h100.json", RATES | slow, **H100, date="2027-01-01")
            constants.newest.cache_clear()
        file = tmp_path / "plan" / "plan.json"
        given = ["plan", "configs/models/llama2_7b.yaml", "--inter-gbit", "100"]
        assert main([*given, "--json", str(file)]) == 0
        found, said = json.loads(file.read_text(encoding="utf-8")), capsys.readouterr().out
        kernels = "; 5 of 5 kernels' rates were measured on this GPU" if measured else ""
        assert f"\nPredicted, not measured{kernels}.\n" in said
        seconds += [one["step_seconds"] for one in found["methods"] if one["name"] == "loco4_exact"]
    assert found["constants"]["compress"] == {
        "value": 1e9,
        "unit": "elements/s",
        "kind": "measured",
        "source": "NVIDIA H100 80GB HBM3, 2027-01-01: benchmarks/gpu/results/h100.json",
    }
    assert seconds[1] > 1.4 * seconds[0]


def test_every_number_has_a_unit_a_kind_and_a_source() -> None:
    for name, one in CONSTANTS.items():
        assert one.value > 0, name
        assert one.kind in ("data sheet", "measured", "paper", "computed", "assumed"), name
        assert one.unit, name
        assert len(one.source) > 10, name
    assert all(gpu.name == name for name, gpu in GPUS.items())


@given(st.floats(0, 10), st.floats(0, 10))
def test_bits_rise_with_the_learning_rate_and_stay_in_bounds(one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert 0 <= exact_bits(low) <= exact_bits(high) <= 16
