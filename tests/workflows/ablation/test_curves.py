"""results_curves.csv, pictures and lines over the steps: what a run logged comes back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from workflows.ablation.test_ablation import check_picture, define, leave

from megatron_patch.errors import UserError
from megatron_patch.workflows import plots
from megatron_patch.workflows.ablation import definition, records
from megatron_patch.workflows.ablation.definition import Run
from megatron_patch.workflows.ablation.records import Point
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.ablation.statistics import over_steps

TEXT = """\
base: configs/models/llama_tiny.yaml
seeds: [1, 2, 3]
overrides: {megatron.train_iters: 20}
baseline: {compression.method: none}
cells:
  - {compression.method: naive, compression.bits: 4}
  - {compression.method: naive, compression.bits: 2}
"""


def test_what_is_written_is_read(tmp_path: Path) -> None:
    runs = definition.read(define(tmp_path, TEXT)).runs(tmp_path / "out")[:3]
    path = tmp_path / "results_curves.csv"
    first = [Point(5, 2.125, 4.125, 16.0), Point(10**9, None, 0.0, 2.071)]
    second = [Point(1, 1000.0, 32.0, 32.0)]
    path.write_text(records.curves_text(list(zip(runs, (first, second, []), strict=True))))
    assert list(records.read_curves(path).values()) == [first, second]
    assert records.beside(tmp_path / "results.csv") == path
    assert records.read_curves(tmp_path / "none.csv") == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    text = ",".join(records.CURVE_COLUMNS) + "\nmethod_naive,1,5,2.5,4.100,3.000,0123\n"
    for old, new, words in (
        ("cell,seed", "cell,sead", "no file of curves"),
        ("naive,1,5,2.5", "naive,1,five,2.5", "line 2: invalid literal"),
        ("naive,1,5,2.5", "naive,1,5,2.5,7", "line 2: too many values"),
        ("method", "\udcff", "cannot be read"),
    ):
        path.write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=f"{path}.*{words}"):
            records.read_curves(path)


def test_the_picture_has_room_for_all(tmp_path: Path) -> None:
    """A definition without a contrast: a band needs two seeds, and NaN is left out."""
    ablation = definition.read(define(tmp_path, TEXT))
    rng = np.random.default_rng(3)
    runs = ablation.runs(tmp_path / "out")
    for run in runs:
        loss = {step: 5 * step**-0.2 + 0.02 * rng.standard_normal() for step in range(1, 201)}
        leave_curve(run, loss | {7: float("nan")})
    plots.draw_curves(tmp_path / "band.png", Results(ablation, runs))
    check_picture(tmp_path / "band.png")


@pytest.mark.parametrize("settings", [1, 7])
def test_few_cells_are_drawn_whole(settings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With long names, and intervals of two seeds that reach far beyond the seeds."""
    closed: list[Any] = []
    monkeypatch.setattr(plots.pyplot(), "close", closed.append)
    keys = ("init_method_std", "adam_beta1", "adam_beta2", "weight_decay", "clip_grad", "adam_eps", "min_lr")
    base, other = (
        ", ".join(f"megatron.{key}: {value}" for key in keys[:settings]) for value in (0.000125, 0.000375)
    )
    cells = f"baseline: {{{base}}}\ncells: [{{{other}}}]\n"
    text = TEXT.partition("baseline")[0].replace("[1, 2, 3]", "[1, 2]") + cells
    runs_of = definition.read(define(tmp_path, text))
    runs = runs_of.runs(tmp_path / "out")
    for run, loss in zip(runs, (2.0, 2.3, 2.0, 2.1), strict=True):
        leave(run, loss)
    plots.draw_differences(tmp_path / "few.png", Results(runs_of, runs))
    check_picture(tmp_path / "few.png")
    (axes,) = closed[0].axes
    interval = next(
        line for line in axes.get_lines() if len(line.get_xdata()) == 2 and any(line.get_ydata() == 0)
    )
    left, right = axes.get_xlim()
    assert left < min(interval.get_xdata())
    assert max(interval.get_xdata()) < right
    assert axes.get_ylim() == (0.5, -0.5)


def test_a_comparison_shows_the_difference_of_curves_that_lie_on_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(plots.pyplot(), "close", closed.append)
    wire = {"bits_per_element": 16.0, "bytes_per_step": 1e6}
    summary = {"valid_loss": 2.0, "gradient_wire": wire, "weight_wire": wire}
    curves = {
        name: [{"step": step, "loss": None if step == lost else factor * 4 / step} for step in range(1, 6)]
        for name, factor, lost in (("none", 1.0, 3), ("loco", 1.001, 4))
    }
    plots.draw_comparison(tmp_path / "picture.png", curves, dict.fromkeys(curves, summary))
    check_picture(tmp_path / "picture.png")
    losses, differences, _ = closed[0].axes
    assert "difference to none" in differences.get_ylabel()
    assert "%" in differences.get_ylabel()
    none, loco = differences.get_lines()
    assert list(none.get_ydata()) == [0, 0, 0, 0]
    assert list(loco.get_xdata()) == [1, 2, 5]
    assert list(loco.get_ydata()) == pytest.approx([0.1] * 3)
    assert losses.get_shared_x_axes().joined(losses, differences)


def leave_curve(run: Run, losses: dict[int, float]) -> None:
    """A run that is done, with these training losses by step."""
    leave(run, 2.0)
    records = [
        {
            "step": step,
            "loss": loss,
            "gradient_wire_bits_per_element": 4.1,
            "weight_wire_bits_per_element": 16.0 if "none" in run.cell.name else 5 - step / 1000,
        }
        for step, loss in losses.items()
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


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
    found = over_steps({1: line, 2: dict.fromkeys(range(10, 1001, 10), 0.1)})
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
