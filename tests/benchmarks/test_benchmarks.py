"""The scripts in benchmarks/ run; what they measure needs the machines that they name."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from worker_pool import WorkerPool

from benchmarks.error_feedback.trend_over_sizes import over_sizes
from megatron_patch.workflows import cli

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def directions_of(bad: int) -> tuple[float, list[dict[str, list[float]]]]:
    """20 steps of two streams, one coordinate turned round: our Adam's error, and the result."""
    script = runpy.run_path(str(BENCHMARKS / "error_feedback" / "step_directions.py"))
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.zeros(8))
    reference = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    mine, directions = script["Adam"](weight.detach()), script["Directions"]()
    furthest = 0.0
    for _ in range(20):
        true = torch.randn(8, generator=generator) * 10.0 ** torch.arange(-4, 4)
        exchanged = true.clone()
        exchanged[bad] *= -1
        directions.add(0, exchanged, true, (0.9, 0.95))
        before = weight.detach().clone()
        weight.grad = true
        reference.step()
        step = mine.direction(true, (0.9, 0.95))
        furthest = max(furthest, float((before - weight.detach() - step).abs().max()))
    return furthest, directions.result()


def test_step_directions_by_hand(pool: WorkerPool) -> None:
    """One of the two largest coordinates turned round: its quarter's step is lost, the others' are whole."""
    furthest, result = pool.run(directions_of, 7, world_size=1)[0]
    assert furthest < 1e-5
    (window,) = result
    everywhere, *quarters, path = window["cosine"]
    assert quarters[:3] == pytest.approx([1, 1, 1])
    assert quarters[3] < 0.9
    assert quarters[3] < everywhere < 1
    assert path < 0.95
    assert window["norm_ratio"] == pytest.approx([1] * 6)
    assert window["along"] == pytest.approx(window["cosine"])


def test_a_line_goes_through_the_seeds_of_several_models(tmp_path: Path) -> None:
    """Differences on a line have no uncertainty; runs that are not done and other cells play no part."""
    for size in (1, 4):
        rows = [f"bits=4,{seed},4,done,{0.5 + 0.1 * size}" for seed in (1, 2)]
        lines = ["cell,seed,compression.bits,state,difference_percent", *rows, "bits=4,3,4,failed,"]
        (tmp_path / f"{size}.csv").write_text("\n".join([*lines, "bits=2,1,2,done,7.0"]))
    models = [f"{size}e6={tmp_path / f'{size}.csv'}" for size in (1, 4)]
    script = [sys.executable, str(BENCHMARKS / "error_feedback" / "trend_over_sizes.py")]
    asked = [*script, "compression.bits=4", "--at", "16e6", *models]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1e+06 parameters: +0.60, +0.60 %",
        "4e+06 parameters: +0.90, +0.90 %",
        "per doubling: +0.150 (+0.150 to +0.150) percentage points",
        "at 1.6e+07 parameters, an extrapolation: +1.200 (+1.200 to +1.200) %",
    ]


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


def test_too_few_models_are_refused() -> None:
    for models in ([(1e6, [0.1, 0.2, 0.3])], [(1e6, [0.1]), (3e6, [0.2])]):
        with pytest.raises(ValueError, match="two sizes"):
            over_sizes(models, 1e9)


def test_the_command_line_says_how_to_run_what_left_it(capsys: pytest.CaptureFixture[str]) -> None:
    for given, way in (
        (["bench", "network", "--hosts", "2"], "python -m benchmarks.network --hosts 2"),
        (["gpu-report"], "python -m benchmarks.gpu"),
    ):
        assert cli.main(given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megatron-loco: error: {given[0]}")
        assert line.endswith(f" runs from a clone of the repository only; at its root: {way}")
