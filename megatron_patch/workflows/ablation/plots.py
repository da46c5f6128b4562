"""differences.png: every cell's difference to the baseline, its seeds and its interval. curves.png: how the
difference in training loss, and the bits a weight, went."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_patch.workflows.ablation import curves
from megatron_patch.workflows.ablation.definition import Cell
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.ablation.statistics import interval
from megatron_patch.workflows.plots import pyplot

_LINES_A_PANEL = 8
_PANELS_A_ROW = 3
_STYLES = ("-", "--", ":", "-.")
_WINDOWS = 40
"""A curve of more logged steps is drawn as the means of as many windows."""
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
    """A PNG at `path`. With few cells and no contrast: training loss, its difference to the baseline with the
    interval over the seeds, and bits a weight, over tokens. Else per panel the differences of the cells that
    differ in the contrasted setting alone."""
    cells = [cell for cell in results.ablation.cells[1:] if results.training_differences(cell)]
    if not cells:
        return
    if results.ablation.contrast or len(cells) > _LINES_A_PANEL:
        figure = _panels(results, cells)
    else:
        figure = _story(results, cells)
    figure.savefig(path, dpi=140)
    pyplot().close(figure)


def _panels(results: Results, cells: Sequence[Cell]) -> Any:
    panels = results.groups() or _chunks(cells)
    panels = {title: [cell for cell in found if cell in cells] for title, found in panels.items()}
    panels = {title: found for title, found in panels.items() if found}
    columns = min(len(panels), _PANELS_A_ROW)
    rows = math.ceil(len(panels) / columns)
    figure, grid = pyplot().subplots(
        rows, columns, figsize=(4.2 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, found) in zip(grid.flat, panels.items(), strict=False):
        styles = itertools.cycle(_STYLES)
        for cell in found:
            name = cell.name
            if results.ablation.contrast:
                name = str(cell.settings[results.ablation.contrast])
            by_step = _by_step(results.training_differences(cell).values())
            means = [statistics.fmean(each) for each in by_step.values()]
            axes.plot(list(by_step), means, label=name, linestyle=next(styles), linewidth=1.4)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(title.replace(",", ", "), fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    for line in grid:
        line[0].set_ylabel(f"training loss against\n{results.ablation.baseline.name}, in %", fontsize=9)
    figure.suptitle("mean over the seeds", fontsize=10)
    return figure


def _story(results: Results, cells: Sequence[Cell]) -> Any:
    baseline = results.ablation.baseline
    tokens = _tokens_a_step(results)
    from matplotlib.ticker import EngFormatter

    figure, (losses, differences, bits) = pyplot().subplots(
        3, 1, figsize=(8, 9), sharex=True, layout="constrained", height_ratios=(3, 3, 2)
    )
    for index, cell in enumerate([baseline, *cells]):
        look = {"color": f"C{index}", "linestyle": _STYLES[index % len(_STYLES)], "linewidth": 1.4}
        runs = [points for (name, _), points in results.points.items() if name == cell.name]
        mean = _by_step([_windowed(curves.losses(points)) for points in runs])
        steps = [step * tokens for step in mean]
        losses.plot(
            steps,
            [statistics.fmean(each) for each in mean.values()],
            label=cell.name.replace(",", ", "),
            **look,
        )
        if runs:
            bits.plot([p.step * tokens for p in runs[0]], [p.weight_bits for p in runs[0]], **look)
        if cell == baseline:
            continue
        pairs = _by_step([_windowed(each) for each in results.training_differences(cell).values()])
        found = [(step * tokens, one) for step, each in pairs.items() if (one := interval(each))]
        differences.plot([step for step, _ in found], [one.mean for _, one in found], **look)
        bands = [(step, one.low, one.high) for step, one in found if one.low is not None]
        if bands:
            differences.fill_between(*zip(*bands, strict=True), color=f"C{index}", alpha=0.12, linewidth=0)
    _fit(differences)
    differences.axhline(0, color="black", linewidth=0.8)
    losses.set_ylabel("training loss")
    differences.set_ylabel(
        f"training loss against\n{baseline.name}, in %\n(mean, 95 % interval over the seeds)"
    )
    bits.set_ylabel("bits a weight\non the wire")
    bits.set_ylim(bottom=0)
    bits.set_xlabel("optimizer step" if tokens == 1 else "tokens")
    bits.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (losses, differences, bits):
        axes.grid(alpha=0.25)
    losses.legend(frameon=False, fontsize=8)
    return figure


def _fit(axes: Any) -> None:
    """Set the y axis by the lines' last three quarters: the first steps' differences are far larger."""
    values = [value for line in axes.get_lines() for value in line.get_ydata()[len(line.get_ydata()) // 4 :]]
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.35 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _tokens_a_step(results: Results) -> int:
    """1 where the runs' batches are not all of one known size."""
    flags = [one.run.configured.megatron for one in results.outcomes]
    sizes = {(each.get("global_batch_size"), each.get("seq_length")) for each in flags}
    batch, length = next(iter(sizes))
    if len(sizes) > 1 or any(each.get("rampup_batch_size") for each in flags):
        return 1
    return batch * length if isinstance(batch, int) and isinstance(length, int) else 1


def _chunks(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    pieces = itertools.batched(cells, _LINES_A_PANEL)
    return {f"cells {index}" if index > 1 else "": list(piece) for index, piece in enumerate(pieces, 1)}


def _windowed(points: dict[int, float]) -> dict[int, float]:
    """Means over at most `_WINDOWS` windows of consecutive logged steps, by the last step of each."""
    steps = sorted(points)
    size = math.ceil(len(steps) / _WINDOWS)
    windows = itertools.batched(steps, size) if steps else ()
    return {window[-1]: statistics.fmean(points[step] for step in window) for window in windows}


def _by_step(runs: Iterable[dict[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        for step, value in run.items():
            found.setdefault(step, []).append(value)
    return dict(sorted(found.items()))
