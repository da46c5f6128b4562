"""A quantity's curves, as an SVG picture to be put into a page.

The picture is drawn for the width that a phone gives it and scales with the page: 440 units wide, text 13
units high, so that text has at least 10 CSS pixels in a column of 340. Text stays text (the reader's own
fonts), and colours are the page's CSS variables, so that a dark page has light lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megatron_patch.workflows.report.groups import Group
from megatron_patch.workflows.report.quantities import Curve, Quantity
from megatron_patch.workflows.report.table import digits

COLOURS = 7
DASHES = ("", "7 3", "2 2", "9 2 2 2")
"""In CSS pixels. 7 colours and 4 dashes have no divisor in common: 28 curves look different."""
MOST_GROUPS = COLOURS * len(DASHES)
MOST_EACH = 8
"""Groups; of more only the means are drawn."""
MOST_POINTS = 600
_WIDTH, _HEIGHT, _TEXT = 440, 290, 13
_POINTS_PER_INCH = 72
# Colours that matplotlib writes into the picture, and what the page is to read instead.
_VARIABLES = {"#000001": "var(--ink)", "#000002": "var(--rule)"}
_VARIABLES |= {f"#0000{0x10 + index:x}": f"var(--curve-{index})" for index in range(COLOURS)}
_INK, _RULE, *_CURVES = _VARIABLES


@dataclass(frozen=True)
class Entry:
    """A line of a figure's legend."""

    style: int
    name: str
    value: str


@dataclass(frozen=True)
class Figure:
    """A quantity's picture and the words around it."""

    quantity: Quantity
    svg: str
    legend: list[Entry]
    notes: list[str]


@dataclass(frozen=True)
class _Drawn:
    """What a figure shows of one group."""

    mean: Curve
    each: list[Curve]
    value: float
    """The legend's number."""


def draw(quantity: Quantity, groups: Sequence[Group]) -> Figure | None:
    """The figure of one quantity; None if no run has a value of it."""
    found = {
        style: drawn for style, group in enumerate(groups) if (drawn := _drawn(quantity, groups[0], group))
    }
    if not found:
        return None
    legend = [Entry(style, groups[style].name, quantity.write(drawn.value)) for style, drawn in found.items()]
    if len(groups) > MOST_EACH:
        found = {style: dataclasses.replace(drawn, each=[]) for style, drawn in found.items()}
    notes = []
    longest = max(len(curve) for drawn in found.values() for curve in (drawn.mean, *drawn.each))
    if longest > MOST_POINTS:
        size = math.ceil(longest / MOST_POINTS)
        notes.append(f"Of long runs up to {size} neighbouring logged steps are drawn as their mean.")
    svg, above = _picture(quantity, found, _described(quantity, legend))
    return Figure(quantity, svg, legend, [*notes, *filter(None, [above])])


def _drawn(quantity: Quantity, first: Group, group: Group) -> _Drawn | None:
    if quantity.key == "difference":
        curves = {} if group is first else _differences(first, group)
    else:
        curves = {id(run): curve for run in group.runs if (curve := quantity.curve(run))}
    counted = [curves[id(run)] for run in group.counted if id(run) in curves] or list(curves.values())
    if not counted:
        return None
    picked = statistics.fmean(list(c.values())[-1] if quantity.last else _median(c) for c in counted)
    return _Drawn(_mean(counted), list(curves.values()) if len(curves) > 1 else [], picked)


def _differences(first: Group, group: Group) -> dict[int, Curve]:
    """id(run) -> its training loss against the first group's, in percent."""
    base = {repr(run.seed): curve for run in first.runs if (curve := run.curve("loss"))}
    if not base:
        return {}
    mean = _mean(list(base.values()))
    found = {}
    for run in group.runs:
        other = base.get(repr(run.seed), mean)
        curve = {
            step: 100 * (loss / other[step] - 1)
            for step, loss in run.curve("loss").items()
            if other.get(step)
        }
        if curve:
            found[id(run)] = curve
    return found


def _median(curve: Curve) -> float:
    finite = [value for value in curve.values() if not math.isnan(value)]
    return statistics.median(finite) if finite else math.nan


def _mean(curves: list[Curve]) -> Curve:
    """At the steps that all curves have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in common}


def _described(quantity: Quantity, legend: list[Entry]) -> str:
    """The picture's text for readers who do not see it; the legend has the numbers of all curves."""
    shown = "; ".join(f"{entry.name}: {entry.value}" for entry in legend[:4])
    more = f"; and {len(legend) - 4} more below" if len(legend) > 4 else ""
    kind = "last values" if quantity.last else "medians"
    return (
        f"{quantity.title}, {quantity.axis}, against the optimizer step. {kind.capitalize()}: {shown}{more}"
    )


def _picture(quantity: Quantity, found: dict[int, _Drawn], label: str) -> tuple[str, str]:
    """The SVG, and a sentence on what lies above the axis."""
    with themed(quantity.key) as (figure, axes):
        for style, drawn in found.items():
            for number, curve in enumerate([*drawn.each, drawn.mean]):
                draw_line(axes, *_thinned(curve), style, number, thin=number < len(drawn.each))
        above = _limits(axes, quantity, list(found.values()))
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(quantity.axis)
        return for_page(figure, quantity.key, label), above


@contextlib.contextmanager
def themed(name: str) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, in the page's colours and sizes; `name` is the picture's own."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # the same runs give the same page
        "font.size": _TEXT,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.edgecolor": _RULE,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-5, 9),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings):
        size = (_WIDTH / _POINTS_PER_INCH, _HEIGHT / _POINTS_PER_INCH)
        figure = Canvas(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(color=_RULE, linewidth=0.6)
        axes.tick_params(length=0)
        yield figure, axes


def draw_line(axes: Any, steps: Any, values: Any, style: int, number: int, thin: bool = False) -> None:
    """A group's line of that number, in the colour of its style, and in its dashes unless it is thin."""
    width, alpha = (0.7, 0.45) if thin else (1.8, 1.0)
    (line,) = axes.plot(steps, values, color=_CURVES[style % COLOURS], linewidth=width, alpha=alpha)
    if not thin and (dashes := DASHES[style % len(DASHES)]):
        # matplotlib counts dashes in line widths.
        line.set_dashes([float(part) / width for part in dashes.split()])
    if np.isfinite(values).sum() == 1:
        line.set_marker("o")  # a line through one point is nothing
        line.set_markersize(4)
    line.set_gid(f"curve-{style}-{number}")


def _thinned(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.array(list(curve), dtype=float), np.array(list(curve.values()))
    if len(steps) <= MOST_POINTS:
        return steps, values
    size = math.ceil(len(steps) / MOST_POINTS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def _limits(axes: Any, quantity: Quantity, found: list[_Drawn]) -> str:
    """Set the y axis so that a few slow steps do not press all curves flat; says what lies above it."""
    curves = [curve for drawn in found for curve in drawn.each or [drawn.mean]]
    values = np.array([value for curve in curves for value in curve.values()])
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    if quantity.key == "difference":
        axes.axhline(0, color=_INK, linewidth=0.8)
    if quantity.key == "loss" and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: digits(value))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    if not quantity.from_zero:
        return ""
    top = 1.1 * values.max()
    if quantity.key == "step_seconds":
        top = min(top, 1.6 * float(np.quantile(values, 0.95)))
    axes.set_ylim(0, top or 1)
    above = values[values > top] if top else values[:0]
    if not len(above):
        return ""
    return f"{len(above)} of {len(values)} points lie above the axis, up to {digits(above.max())}."


def for_page(figure: Any, name: str, label: str) -> str:
    """matplotlib's SVG as an element of a page that has several of them."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True)
    body = stream.getvalue().partition("<svg")[2]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.S)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # it would hold for the whole page
    # Identifiers must be the page's only ones of that name; curves are found by class (page.html).
    body = re.sub(r'<g id="curve-(\d+)-\d+"', r'<g class="curve curve-\1"', body)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + body[body.index(">") + 1 :].strip()
