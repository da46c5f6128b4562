"""Draws the page's figures: a quantity's curves over the steps, with a thick line for each configuration."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_patch.workflows import plots
from megatron_patch.workflows.report.table import Group, digits
from megatron_patch.workflows.run_reader import Run

MOST_GROUPS = plots.COLOURS * len(plots.DASHES)
MOST_EACH = 8
"""With more groups than this, only each group's mean is drawn, and not its single runs."""
MOST_POINTS = 600
Curve = dict[int, float]
"""Maps optimizer steps to values."""


@dataclass(frozen=True)
class Quantity:
    """The quantity that one figure shows for every run."""

    key: str
    """The quantity's name in metrics.jsonl, or `difference`."""
    title: str
    axis: str
    about: str
    factor: float = 1.0
    last: bool = False
    """Whether the legend shows the last value, and not the median."""
    from_zero: bool = False
    form: str = ""
    """The format specification of the legend's numbers; if empty, they have three significant digits."""
    unit: str = ""
    of_exact_gather: bool = False
    """Whether the figure is drawn only if a run gathers weights exactly."""

    def curve(self, run: Run) -> Curve:
        return {step: value * self.factor for step, value in run.curve(self.key).items()}

    def write(self, value: float) -> str:
        return format(value, self.form) + self.unit if self.form else digits(value)


QUANTITIES = (
    Quantity(
        "loss",
        "Training loss",
        "training loss",
        "The language model's, as Megatron logs it.",
        last=True,
        form=".4f",
    ),
    Quantity(
        "difference",
        "Training loss against the first configuration",
        "difference (%)",
        "At the same step and, where it has one, against the run of the same seed.",
        last=True,
        form="+.2f",
        unit=" %",
    ),
    Quantity("step_seconds", "Step time", "seconds per step", "Of the logged steps.", from_zero=True),
    Quantity(
        "gradient_wire_bytes",
        "Gradient bytes on the wire",
        "MB per step",
        "Payload that one rank sends in a step, mean of the ranks.",
        factor=1e-6,
        from_zero=True,
    ),
    Quantity(
        "weight_wire_bytes",
        "Weight bytes on the wire",
        "MB per step",
        "The all-gather of the updated weights, by one rank: in full, or exactly from what the step changed.",
        factor=1e-6,
        from_zero=True,
    ),
    Quantity(
        "weight_wire_bits_per_element",
        "Bits per weight on the wire",
        "bits per weight",
        "What travelled: messages as long as the longest of all ranks', their lengths, and gathers in full.",
        from_zero=True,
        of_exact_gather=True,
    ),
    Quantity(
        "weight_message_bits_per_element",
        "Bits per weight of the messages",
        "bits per weight",
        "The code's own size, mean of the ranks; what travelled beyond it is padding, lengths and gathers in "
        "full.",
        from_zero=True,
        of_exact_gather=True,
    ),
    Quantity(
        "weight_unchanged_share",
        "Unchanged weights",
        "share of the weights (%)",
        "Of the weights that were coded: those that the step left as they were.",
        factor=100,
        from_zero=True,
        form=".1f",
        unit=" %",
        of_exact_gather=True,
    ),
    Quantity(
        "compression_snr_db",
        "Signal-to-noise ratio of compression",
        "dB",
        "Power of what was to be sent over power of what quantization changed of it; 6 dB are a factor of "
        "two in amplitude. Higher is better.",
    ),
    Quantity(
        "compensation_norm_ratio",
        "Norm of the remembered error",
        "error / gradient",
        "Norm of the error state over norm of the gradient.",
        last=True,
        from_zero=True,
    ),
)


@dataclass(frozen=True)
class Entry:
    """A line of a figure's legend."""

    style: int
    name: str
    value: str


@dataclass(frozen=True)
class Figure:
    """The picture of a quantity with its legend and notes."""

    quantity: Quantity
    svg: str
    legend: list[Entry]
    notes: list[str]


@dataclass(frozen=True)
class _Drawn:
    """The curves of one group in a figure."""

    mean: Curve
    each: list[Curve]
    value: float
    """The number in the legend."""


def draw(quantity: Quantity, groups: Sequence[Group]) -> Figure | None:
    """Return the figure of one quantity; None if no run has a value of it."""
    by_style = {
        style: drawn for style, group in enumerate(groups) if (drawn := _drawn(quantity, groups[0], group))
    }
    if not by_style:
        return None
    legend = [
        Entry(style, groups[style].name, quantity.write(drawn.value)) for style, drawn in by_style.items()
    ]
    if len(groups) > MOST_EACH:
        by_style = {style: dataclasses.replace(drawn, each=[]) for style, drawn in by_style.items()}
    notes = []
    longest = max(len(curve) for drawn in by_style.values() for curve in (drawn.mean, *drawn.each))
    if longest > MOST_POINTS:
        size = math.ceil(longest / MOST_POINTS)
        notes.append(f"Of long runs up to {size} neighbouring logged steps are drawn as their mean.")
    with plots.svg_axes(quantity.key) as (figure, axes):
        for style, drawn in by_style.items():
            for number, curve in enumerate([*drawn.each, drawn.mean]):
                plots.svg_line(axes, *_thinned(curve), style, number, thin=number < len(drawn.each))
        notes += _limits(axes, quantity, list(by_style.values()))
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(quantity.axis)
        svg = plots.svg_element(figure, quantity.key, _described(quantity, legend))
    return Figure(quantity, svg, legend, notes)


def draw_trial(number: int, rows: Sequence[dict[str, Any]]) -> str:
    """Return a picture of what a trial's choices change of a step, with their 95 % intervals."""
    name = f"trial-{number}"
    with plots.svg_axes(name) as (figure, axes):
        for place, row in enumerate(rows):
            ends = [[row["percent"] - row["low"]], [row["high"] - row["percent"]]]
            axes.errorbar([row["percent"]], [place], xerr=ends, fmt="o", capsize=4, color=plots.INK)
        axes.axvline(0, color=plots.INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row["choice"].replace(", ", ",\n") for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("step time against stock (%)")
        found = "; ".join(f"{row['choice']}: {row['percent']:+.1f} %" for row in rows)
        return plots.svg_element(figure, name, f"Step time of a trial's choices against stock: {found}")


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
    """Return for each id(run) the difference of its training loss to the first group's, in percent."""
    base = {repr(run.seed): curve for run in first.runs if (curve := run.curve("loss"))}
    mean = _mean(list(base.values())) if base else {}
    curves = {}
    for run in group.runs:
        other, own = base.get(repr(run.seed), mean), run.curve("loss")
        curves[id(run)] = {s: 100 * (loss / other[s] - 1) for s, loss in own.items() if other.get(s)}
    return {run: curve for run, curve in curves.items() if curve}


def _median(curve: Curve) -> float:
    finite = [value for value in curve.values() if not math.isnan(value)]
    return statistics.median(finite) if finite else math.nan


def _mean(curves: list[Curve]) -> Curve:
    """Return the mean of the curves at the steps that all of them have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in common}


def _described(quantity: Quantity, legend: list[Entry]) -> str:
    """Return the picture's alternative text; the legend on the page has the numbers of all curves."""
    shown = "; ".join(f"{entry.name}: {entry.value}" for entry in legend[:4])
    more = f"; and {len(legend) - 4} more below" if len(legend) > 4 else ""
    kind = "Last values" if quantity.last else "Medians"
    return f"{quantity.title}, {quantity.axis}, against the optimizer step. {kind}: {shown}{more}"


def _thinned(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.array(list(curve), dtype=float), np.array(list(curve.values()))
    if len(steps) <= MOST_POINTS:
        return steps, values
    starts = np.arange(0, len(steps), math.ceil(len(steps) / MOST_POINTS))
    counts = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def _limits(axes: Any, quantity: Quantity, groups: list[_Drawn]) -> list[str]:
    """Set the y axis so that a few slow steps do not flatten all curves; return a note on points above it."""
    curves = [curve for drawn in groups for curve in drawn.each or [drawn.mean]]
    values = np.array([value for curve in curves for value in curve.values()])
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    if quantity.key == "difference":
        axes.axhline(0, color=plots.INK, linewidth=0.8)
    if quantity.key == "loss" and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: digits(value))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    if not quantity.from_zero:
        return []
    top = 1.1 * values.max()
    if quantity.key == "step_seconds":
        top = min(top, 1.6 * float(np.quantile(values, 0.95)))
    axes.set_ylim(0, top or 1)
    above = values[values > top] if top else values[:0]
    if not len(above):
        return []
    return [f"{len(above)} of {len(values)} points lie above the axis, up to {digits(above.max())}."]
