"""Lines through differences over the steps of long runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from workflows.ablation.test_ablation import define
from workflows.ablation.test_curves import TEXT, leave_curve

from megatron_patch.workflows.ablation import definition
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.ablation.statistics import over_steps


def test_a_line_over_the_steps_is_found() -> None:
    """The warm-up's quarter plays no part."""
    rng = np.random.default_rng(1)
    slopes = rng.normal(0.2, 0.05, 5)
    differences = {
        seed: {step: (0.1 + slope * math.log2(step) if step > 500 else 40.0) for step in range(10, 2001, 10)}
        for seed, slope in enumerate(slopes)
    }
    found = over_steps(differences)
    assert found is not None
    known = stats.t.interval(0.95, 4, slopes.mean(), stats.sem(slopes))
    assert (found.doubling.low, found.doubling.high) == pytest.approx(known)
    last = [np.mean([d for step, d in each.items() if step > 1500]) for each in differences.values()]
    assert found.last.mean == pytest.approx(np.mean(last))


def test_short_runs_have_no_trend() -> None:
    line = dict.fromkeys(range(10, 991, 10), 0.1)
    assert over_steps({1: line}) is None
    assert over_steps({1: dict.fromkeys(range(250, 2001, 250), 0.1)}) is None, "6 points"
    assert over_steps({}) is None
    long = dict.fromkeys(range(10, 1001, 10), 0.1)
    found = over_steps({1: line, 2: long})
    assert found is not None
    assert (found.last.n, found.doubling.n) == (1, 1)


def test_the_table_is_of_long_runs_alone(tmp_path: Path) -> None:
    ablation = definition.read(define(tmp_path, TEXT))
    runs = ablation.runs(tmp_path / "out")
    for steps, rows in ((200, 0), (2000, 2)):
        for run in runs:
            factor = 1.0 if run.cell == ablation.baseline else 1 + 0.01 * math.log2(steps)
            leave_curve(run, dict.fromkeys(range(10, steps + 1, 10), 3.0 * factor))
        results = Results(ablation, runs)
        assert len(results.trend_rows()) == rows
        assert ("Over the steps" in results.markdown()) == bool(rows)
    for row in results.trend_rows():
        assert row[1:3] == ("3", f"{math.log2(2000):+.2f} %")
        assert row[4] in ("+0.00", "-0.00")  # points
