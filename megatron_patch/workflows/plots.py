"""Draws PNGs for `compare` and `ablate`, and SVG elements for the page of `report`.

An SVG picture is drawn for the width of a phone and scales with the page: it is 440 units wide and its text
13 units high, so that text has at least 10 CSS pixels in a column of 340. Text is not converted to paths, and
colours are the page's CSS variables, so that a dark page has light lines.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_patch.workflows.ablation.statistics import interval

if TYPE_CHECKING:
    from megatron_patch.workflows.ablation.definition import Cell
    from megatron_patch.workflows.ablation.results import Results

_STYLES = ("-", "--", ":", "-.")
_LINES_A_PANEL = 8
_PANELS_A_ROW = 3
_WINDOWS = 40
"""A curve of more logged steps than this is drawn as the means of this many windows."""
_LINEAR_PERCENT = 1.0
"""Larger differences are drawn on a logarithmic scale, so that 0.1 % and 30 % fit into one picture."""

COLOURS = 7
DASHES = ("", "7 3", "2 2", "9 2 2 2")
"""Dashes in CSS pixels. 7 colours and 4 dashes have no common divisor, so that 28 curves look different."""
_WIDTH, _HEIGHT, _TEXT = 440, 290, 13
_POINTS_PER_INCH = 72
# matplotlib writes these colours, which `svg_element` replaces by the page's variables.
_VARIABLES = {"#000001": "var(--ink)", "#000002": "var(--rule)"}
_VARIABLES |= {f"#0000{0x10 + index:x}": f"var(--curve-{index})" for index in range(COLOURS)}
INK, _RULE, *_CURVES = _VARIABLES


def pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # Megatron lets every INFO line through.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextlib.contextmanager
def _png(path: Path, rows: int = 1, columns: int = 1, **of_figure: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and write the picture to `path` at the end of the block."""
    plt = pyplot()
    figure, axes = plt.subplots(rows, columns, layout="constrained", **of_figure)
    yield figure, axes
    figure.savefig(path, dpi=140)
    plt.close(figure)


def draw_comparison(
    path: Path, records: Mapping[str, Sequence[dict[str, Any]]], summaries: dict[str, dict[str, Any]]
) -> None:
    """Draw training losses with their differences to the first run's, and bytes sent per step, as a PNG."""
    shape: dict[str, Any] = {"figsize": (10, 5), "width_ratios": (3, 2), "height_ratios": (3, 2)}
    with _png(path, 2, 2, sharex="col", **shape) as (figure, grid):
        (losses, _), (differences, _) = grid
        for axes in grid[:, 1]:
            axes.remove()
        wire = figure.add_subplot(losses.get_gridspec()[:, 1])
        curves = {
            name: {r["step"]: r["loss"] for r in logged if r["loss"] is not None}
            for name, logged in records.items()
        }
        baseline, base = next(iter(curves.items()))
        for (name, curve), style in zip(curves.items(), itertools.cycle(_STYLES), strict=False):
            valid = summaries[name]["valid_loss"]
            label = name if valid is None else f"{name} (validation {valid:.4f})"
            losses.plot(list(curve), list(curve.values()), label=label, linestyle=style, linewidth=1.4)
            percent = {step: 100 * (loss / base[step] - 1) for step, loss in curve.items() if base.get(step)}
            differences.plot(list(percent), list(percent.values()), linestyle=style, linewidth=1.4)
        losses.set_ylabel("training loss")
        losses.legend(frameon=False)
        differences.set_xlabel("optimizer step")
        differences.set_ylabel(f"difference to {baseline},\nin % of its loss")
        for axes in (losses, differences):
            axes.grid(alpha=0.25)

        kinds = ("gradient_wire", "weight_wire")
        bits = {name: [s[kind]["bits_per_element"] for kind in kinds] for name, s in summaries.items()}
        rows = [f"{name}\n{' + '.join(f'{b:.1f}' for b in pair)} bits" for name, pair in bits.items()]
        gradients, weights = ([s[kind]["bytes_per_step"] / 1e6 for s in summaries.values()] for kind in kinds)
        wire.barh(rows, gradients, label="gradients", height=0.5)
        wire.barh(rows, weights, left=gradients, label="weights", alpha=0.4, height=0.5)
        wire.invert_yaxis()
        wire.set_xlabel("MB sent by one rank per step")
        wire.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2)


def draw_differences(path: Path, results: Results) -> None:
    """Draw the differences of an ablation's cells to the baseline, with seeds and intervals, as a PNG.

    A cell that has no seed in common with the baseline is left out.
    """
    by_cell = {cell.name: list(results.differences(cell).values()) for cell in results.ablation.cells[1:]}
    by_cell = {name: values for name, values in by_cell.items() if values}
    if not by_cell:
        return
    longest, ends = max(map(len, [results.ablation.baseline.name, *by_cell])), [0.0]
    size = (max(9, 5 + 0.085 * longest), 0.32 * len(by_cell) + 1.4)  # in inches, with room for all names
    with _png(path, figsize=size) as (figure, axes):
        for row, values in enumerate(by_cell.values()):
            estimate = interval(values)
            assert estimate is not None
            ends += [*values, *(end for end in (estimate.low, estimate.high) if end is not None)]
            color = "C0" if estimate.verdict in ("better", "worse") else "0.45"
            axes.scatter(values, [row] * len(values), s=12, color=color, alpha=0.35, linewidths=0)
            axes.plot(estimate.mean, row, "o", color=color, markersize=5)
            if estimate.low is not None:
                axes.plot([estimate.low, estimate.high], [row, row], color=color, linewidth=2)
        axes.axvline(0, color="black", linewidth=0.8)
        low, high = min(ends), max(ends)
        if max(high, -low) > 5 * _LINEAR_PERCENT:
            axes.set_xscale("symlog", linthresh=_LINEAR_PERCENT)
            sizes = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
            ticks = [-size for size in sizes if low <= -size] + [0] + [size for size in sizes if size <= high]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlim(1.5 * low - 0.1, 1.5 * high + 0.1)
        axes.set_yticks(range(len(by_cell)), [name.replace(",", ", ") for name in by_cell])
        axes.set_ylim(len(by_cell) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.25)
        # The label belongs to the figure, because axes beside long names are narrower than its text.
        figure.supxlabel(
            f"validation loss against {results.ablation.baseline.name} of the same seed, in %\n"
            "mean and 95 % interval, each seed a faint dot; grey: the interval contains zero",
            fontsize=10,
        )


def draw_curves(path: Path, results: Results) -> None:
    """Draw an ablation's training losses as a PNG.

    With few cells and no contrast, the picture shows training loss, its difference to the baseline with the
    interval over the seeds, and bits per weight. Otherwise each panel shows the differences of cells that
    differ only in the contrasted setting.
    """
    cells = [cell for cell in results.ablation.cells[1:] if results.training_differences(cell)]
    if cells and (results.ablation.contrast or len(cells) > _LINES_A_PANEL):
        _draw_panels(path, results, cells)
    elif cells:
        _draw_story(path, results, cells)


def _draw_panels(path: Path, results: Results, cells: Sequence[Cell]) -> None:
    contrast = results.ablation.contrast
    pieces = enumerate(itertools.batched(cells, _LINES_A_PANEL), 1)
    panels: dict[str, Sequence[Cell]] = dict(results.groups()) or {
        f"cells {index}" if index > 1 else "": piece for index, piece in pieces
    }
    panels = {title: there for title, group in panels.items() if (there := [c for c in group if c in cells])}
    columns = min(len(panels), _PANELS_A_ROW)
    rows = math.ceil(len(panels) / columns)
    with _png(path, rows, columns, figsize=(4.2 * columns, 3.1 * rows), squeeze=False) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.axis("off")
        for axes, (title, group) in zip(grid.flat, panels.items(), strict=False):
            for cell, style in zip(group, itertools.cycle(_STYLES), strict=False):
                by_step = _by_step(results.training_differences(cell).values())
                means = [statistics.fmean(values) for values in by_step.values()]
                name = str(cell.settings[contrast]) if contrast else cell.name
                axes.plot(list(by_step), means, label=name, linestyle=style, linewidth=1.4)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_title(title.replace(",", ", "), fontsize=10)
            axes.legend(frameon=False, fontsize=8)
            axes.grid(alpha=0.25)
        for axes in grid[-1]:
            axes.set_xlabel("optimizer step")
        for line in grid:
            line[0].set_ylabel(f"training loss against\n{results.ablation.baseline.name}, in %", fontsize=9)
        figure.suptitle("mean over the seeds", fontsize=10)


def _draw_story(path: Path, results: Results, cells: Sequence[Cell]) -> None:
    from matplotlib.ticker import EngFormatter

    baseline, tokens = results.ablation.baseline, results.tokens_a_step()
    shape: dict[str, Any] = {"figsize": (8, 9), "sharex": True, "height_ratios": (3, 3, 2)}
    with _png(path, 3, 1, **shape) as (_, (losses, differences, bits)):
        for index, cell in enumerate([baseline, *cells]):
            look = {"color": f"C{index}", "linestyle": _STYLES[index % len(_STYLES)], "linewidth": 1.4}
            runs = [points for run, points in results.logged if run.cell == cell]
            steps = _by_step(_windowed(curve) for curve in results.training_losses(cell).values())
            means = [statistics.fmean(values) for values in steps.values()]
            losses.plot([step * tokens for step in steps], means, label=cell.name.replace(",", ", "), **look)
            if runs:
                bits.plot([p.step * tokens for p in runs[0]], [p.weight_bits for p in runs[0]], **look)
            if cell == baseline:
                continue
            pairs = _by_step(_windowed(curve) for curve in results.training_differences(cell).values())
            points = [(step * tokens, e) for step, values in pairs.items() if (e := interval(values))]
            differences.plot([step for step, _ in points], [e.mean for _, e in points], **look)
            bands = [(step, e.low, e.high) for step, e in points if e.low is not None]
            if bands:
                band = zip(*bands, strict=True)
                differences.fill_between(*band, color=f"C{index}", alpha=0.12, linewidth=0)
        _fit_to_the_later_steps(differences)
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


def _fit_to_the_later_steps(axes: Any) -> None:
    """Fit the y axis to the last three quarters of the steps, because earlier differences are far larger."""
    values = [value for line in axes.get_lines() for value in line.get_ydata()[len(line.get_ydata()) // 4 :]]
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.35 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _windowed(points: dict[int, float]) -> dict[int, float]:
    """Return means over at most `_WINDOWS` windows of consecutive logged steps, by their last steps."""
    steps = sorted(points)
    windows = itertools.batched(steps, math.ceil(len(steps) / _WINDOWS)) if steps else ()
    return {window[-1]: statistics.fmean(points[step] for step in window) for window in windows}


def _by_step(runs: Iterable[dict[int, float]]) -> dict[int, list[float]]:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in run.items():
            by_step.setdefault(step, []).append(value)
    return dict(sorted(by_step.items()))


@contextlib.contextmanager
def svg_axes(name: str) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes in the page's colours and sizes; `name` identifies the picture."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # The same runs give the same page.
        "font.size": _TEXT,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": _RULE,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-5, 9),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings):
        size = (_WIDTH / _POINTS_PER_INCH, _HEIGHT / _POINTS_PER_INCH)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(color=_RULE, linewidth=0.6)
        axes.tick_params(length=0)
        yield figure, axes


def svg_line(axes: Any, steps: Any, values: Any, style: int, number: int, thin: bool = False) -> None:
    """Draw line `number` of a group in the colour of its style, and in its dashes unless it is thin."""
    width, alpha = (0.7, 0.45) if thin else (1.8, 1.0)
    (line,) = axes.plot(steps, values, color=_CURVES[style % COLOURS], linewidth=width, alpha=alpha)
    if not thin and (dashes := DASHES[style % len(DASHES)]):
        # matplotlib counts dashes in line widths.
        line.set_dashes([float(part) / width for part in dashes.split()])
    if np.isfinite(values).sum() == 1:
        line.set_marker("o")  # A line through a single point would be invisible.
        line.set_markersize(4)
    line.set_gid(f"curve-{style}-{number}")


def svg_element(figure: Any, name: str, label: str) -> str:
    """Return matplotlib's SVG as an element for a page that has several of them."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True)
    body = stream.getvalue().partition("<svg")[2]
    # A <style> element would apply to the whole page.
    body = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>", "", body, flags=re.S)
    # Identifiers must be unique in the page; it finds curves by their class (page.html).
    body = re.sub(r'<g id="curve-(\d+)-\d+"', r'<g class="curve curve-\1"', body)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + body[body.index(">") + 1 :].strip()
