"""differences.png: every cell's difference to the baseline, its seeds and its interval. curves.png: how the
difference in training loss went, step by step."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron_patch.workflows.ablation.definition import Cell
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.ablation.statistics import interval
from megatron_patch.workflows.plots import pyplot

_LINES_A_PANEL = 8
_PANELS_A_ROW = 3
_LINEAR_PERCENT = 1.0
"""Up to this a difference is drawn to scale, beyond by its logarithm: 0.1 % and 30 % share a picture."""


def draw_differences(path: Path, results: Results) -> None:
    """A PNG at `path`; cells without a pair of runs are left out."""
    found = [(cell, list(results.differences(cell).values())) for cell in results.ablation.cells[1:]]
    found = [(cell, values) for cell, values in found if values]
    if not found:
        return
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(found) + 1.4), layout="constrained")
    for row, (_, each) in enumerate(found):
        one = interval(each)
        assert one is not None
        known = one.low is not None and one.high is not None
        clear = known and one.verdict != "contains zero"
        color = "C0" if clear else "0.45"
        axes.scatter(each, [row] * len(each), s=12, color=color, alpha=0.35, linewidths=0)
        axes.plot(one.mean, row, "o", color=color, markersize=5)
        if known:
            axes.plot([one.low, one.high], [row, row], color=color, linewidth=2)
    axes.axvline(0, color="black", linewidth=0.8)
    values = [value for _, each in found for value in each]
    low, high = min(0.0, *values), max(0.0, *values)
    if max(high, -low) > 5 * _LINEAR_PERCENT:
        axes.set_xscale("symlog", linthresh=_LINEAR_PERCENT)
        sizes = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
        ticks = [-size for size in sizes if low <= -size] + [0] + [size for size in sizes if size <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(1.5 * low - 0.1, 1.5 * high + 0.1)
    axes.set_yticks(range(len(found)), [cell.name.replace(",", ", ") for cell, _ in found])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    # Of the figure, not of the axes: beside long names these are narrower than the text.
    figure.supxlabel(
        f"validation loss against {results.ablation.baseline.name} of the same seed, in %\n"
        "mean and 95 % interval, each seed a faint dot; grey: the interval contains zero",
        fontsize=10,
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def draw_curves(path: Path, results: Results) -> None:
    """A PNG at `path`: per panel the cells that differ in the contrasted setting alone."""
    panels = results.groups() or _chunks(results.ablation.cells[1:])
    curves = {cell.name: _curve(results, cell) for cell in itertools.chain(*panels.values())}
    panels = {title: [cell for cell in cells if curves[cell.name]] for title, cells in panels.items()}
    panels = {title: cells for title, cells in panels.items() if cells}
    if not panels:
        return
    plt = pyplot()
    columns = min(len(panels), _PANELS_A_ROW)
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, cells) in zip(grid.flat, panels.items(), strict=False):
        styles = itertools.cycle(("-", "--", ":", "-."))
        for cell in cells:
            name = cell.name
            if results.ablation.contrast:
                name = str(cell.settings[results.ablation.contrast])
            axes.plot(
                *zip(*curves[cell.name], strict=True), label=name, linestyle=next(styles), linewidth=1.4
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(title.replace(",", ", "), fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    for line in grid:
        line[0].set_ylabel(f"training loss against\n{results.ablation.baseline.name}, in %", fontsize=9)
    figure.suptitle("mean over the seeds", fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _chunks(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    pieces = itertools.batched(cells, _LINES_A_PANEL)
    return {f"cells {index}" if index > 1 else "": list(piece) for index, piece in enumerate(pieces, 1)}


def _curve(results: Results, cell: Cell) -> list[tuple[int, float]]:
    """By logged step, the mean over the paired seeds of the training loss against the baseline's, in %; of
    runs whose folders are there."""
    by_step: dict[int, list[float]] = {}
    folders = {
        (one.run.cell.name, one.run.seed): one.run.folder for one in results.outcomes if one.loss is not None
    }
    for seed in results.differences(cell):
        base = _losses(folders[results.ablation.baseline.name, seed])
        for step, loss in _losses(folders[cell.name, seed]).items():
            if step in base:
                by_step.setdefault(step, []).append(100 * (loss - base[step]) / base[step])
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


def _losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in found if record["loss"] is not None}
