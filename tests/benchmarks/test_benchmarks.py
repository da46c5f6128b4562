"""The scripts in benchmarks/ run; what they measure needs the machines that they name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from benchmarks.command_line import main
from benchmarks.error_feedback.trend_over_sizes import over_sizes
from benchmarks.kernels import command, cpu_rates
from megatron_patch.quantization import native
from megatron_patch.workflows import cli


def test_a_line_over_sizes_agrees_with_a_regression() -> None:
    rng = np.random.default_rng(2)
    models = [(size, list(rng.normal(0.1, 0.05, n))) for size, n in ((1e6, 3), (3.4e6, 3), (1e7, 1))]
    found = over_sizes(models, 1e9)
    x = [math.log2(size) for size, each in models for _ in each]
    y = [one for _, each in models for one in each]
    line = stats.linregress(x, y)
    half = stats.t.ppf(0.975, 5)
    assert found.doubling.mean == pytest.approx(line.slope)
    assert found.doubling.high - found.doubling.mean == pytest.approx(half * line.stderr)
    # At 0 of a shifted axis the line is its intercept.
    there = stats.linregress(np.array(x) - math.log2(1e9), y)
    assert found.there.mean == pytest.approx(there.intercept)
    assert found.there.mean - found.there.low == pytest.approx(half * there.intercept_stderr)
    assert found.there.n == 7


def test_the_command_line_says_how_to_run_what_left_it(capsys: pytest.CaptureFixture[str]) -> None:
    for given, way in (
        (["bench", "network", "--hosts", "2"], "python -m benchmarks.network --hosts 2"),
        (["gpu-report"], "python -m benchmarks.gpu"),
    ):
        assert cli.main(given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megatron-loco: error: {given[0]}")
        assert line.endswith(f" runs from a clone of the repository only; at its root: {way}")


def test_kernels_are_measured_beside_memcpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    assert main(command, ["--seconds", "0.05", "--elements", "200000", "--json", str(numbers)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 bits, codec levels, rotation hadamard" in shown
    found = json.loads(numbers.read_text())
    assert found["memcpy_bytes_per_second"] > 1e8
    assert found["bytes_per_element"] == pytest.approx(4 + 1 + 1 + 0.5 + 6 / 128, rel=1e-3)
    weights = found["weight_code"]
    assert 2 < weights["bits_per_weight"] < 3
    assert min(weights[f"{way}_weights_per_second"] for way in ("encode", "decode", "digest")) > 1e5
    assert all(rate > 1e5 for rate in found["onebit_adam"].values())
    rates = found["elements_per_second"]
    assert rates["torch_chunked"] > 0
    if native.variants():
        assert rates["native"] > rates["torch_chunked"]
        names = {f"native_{name}" for name in native.variants()}
        assert names <= set(rates)
        assert set(found["uniform_elements_per_second"]) == names | {"decompress_reduce"}


def test_the_typical_call_is_the_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The end, and calls of 3, 1 and 2 seconds.
    clock = iter([0.0, *(0.0, 3.0), *(3.0, 4.0), *(4.0, 6.0), 9.0] * 2)
    monkeypatch.setattr(cpu_rates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert cpu_rates._timed([lambda: None], 5.0, typical=False) == [1.0]
    assert cpu_rates._timed([lambda: None], 5.0, typical=True) == [2.0]
