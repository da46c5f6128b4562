"""Whether what compression costs grows: with the length of a run, and with the size of the model.

Over the steps, for each seed, by least squares, d the difference in training loss in percent:

    d(step) = a + g log2(step)

g is the change per doubling; its interval is Student's t over the seeds. Over sizes, all seeds' differences d
of some models, P their parameters, likewise d = a + g log2(P), with the intervals of a regression: at a P far
from those measured it is an extrapolation, and its interval supposes that the line is straight up to there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_patch.workflows.ablation.statistics import CONFIDENCE, Interval, interval

_LEAST_STEPS = 1000
"""Of shorter runs the warm-up is too large a part."""
_LEAST_POINTS = 8
WHAT = (
    "Over the steps: training loss against the baseline of the same seed, in percent, in the last quarter of "
    "the steps; and how that difference changes each time the steps double, by a fit to the last three "
    "quarters, in percentage points"
)


@dataclass(frozen=True)
class OverSteps:
    """What becomes of a difference within long runs.

    Attributes:
        last: its mean over the last quarter of the steps, percent.
        doubling: its change per doubling of the steps, percentage points; of the last three quarters.
    """

    last: Interval
    doubling: Interval


def over_steps(differences: Mapping[int, Mapping[int, float]]) -> OverSteps | None:
    """Of differences in percent, {seed: {step: d}}; None where runs are short or few steps were logged."""
    last, slopes = [], []
    for each in differences.values():
        end = max(each)
        fitted = sorted(step for step in each if step > end / 4)
        if end < _LEAST_STEPS or len(fitted) < _LEAST_POINTS:
            continue
        slopes.append(float(np.polyfit(np.log2(fitted), [each[step] for step in fitted], 1)[0]))
        last.append(statistics.fmean(each[step] for step in fitted if step > 3 * end / 4))
    means, changes = interval(last), interval(slopes)
    return OverSteps(means, changes) if means and changes else None


@dataclass(frozen=True)
class OverSizes:
    """A line through the differences of several models.

    Attributes:
        doubling: the change per doubling of the parameters, percentage points.
        there: the line at the size that was asked for, percent.
    """

    doubling: Interval
    there: Interval


def over_sizes(differences: Sequence[tuple[float, Sequence[float]]], parameters: float) -> OverSizes:
    """The line through [(a model's parameters, its seeds' differences in percent)], also at `parameters`.

    Raises:
        ValueError: fewer than two sizes, or fewer than three differences.
    """
    points = [(math.log2(size), one) for size, each in differences for one in each]
    if len({x for x, _ in points}) < 2 or len(points) < 3:
        raise ValueError("a line needs two sizes, and its interval three runs")
    from scipy import stats  # half a second

    x, y = np.array(points).T
    slope, intercept = np.polyfit(x, y, 1)
    rest = y - (intercept + slope * x)
    n, spread_x = len(x), float(((x - x.mean()) ** 2).sum())
    spread = math.sqrt(float((rest**2).sum()) / (n - 2))
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 2))

    far = math.log2(parameters)
    at_mean = t * spread / math.sqrt(n)
    per_doubling = t * spread / math.sqrt(spread_x)

    def around(mean: float, half: float) -> Interval:
        return Interval(n, mean, spread, mean - half, mean + half)

    return OverSizes(
        around(float(slope), per_doubling),
        around(float(intercept + slope * far), math.hypot(at_mean, per_doubling * (far - float(x.mean())))),
    )
