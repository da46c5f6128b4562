"""Computes confidence intervals of paired differences, and how differences change with the length of a run.

The same seed gives two cells the same initial weights and batches, so that much of the spread between seeds
cancels in their difference. The interval is Student's t over the seeds' differences d_1 ... d_n:

    mean(d) +- t(n - 1, (1 + confidence) / 2) * sd(d) / sqrt(n)

It covers the true mean with that probability for one comparison by itself; of twenty such intervals whose
true mean is zero, one misses zero on average.

Whether the cost of compression grows with a run's length is shown by a fit for each seed, by least squares:
d(step) = a + g log2(step), where d is the difference in training loss in percent. g is the change per
doubling of the steps; its interval is over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_LEAST_STEPS = 1000
"""Shorter runs have no fit, because the warm-up is too large a part of them."""
_LEAST_POINTS = 8
OVER_STEPS = (
    "Over the steps: training loss against the baseline of the same seed, in percent, in the last quarter of "
    "the steps; and how that difference changes each time the steps double, by a fit to the last three "
    "quarters, in percentage points"
)


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds, its standard deviation and confidence interval; bounds are None for one seed."""

    n: int
    mean: float
    spread: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Whether the interval contains zero, in words."""
        if self.low is None or self.high is None:
            return "one seed"
        if self.low <= 0 <= self.high:
            return "contains zero"
        return "worse" if self.mean > 0 else "better"


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return the interval of the mean of `values`; None if there are no values."""
    if not values:
        return None
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Interval(1, mean, 0.0, None, None)
    from scipy import stats  # This import takes half a second.

    spread = statistics.stdev(values)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * spread / math.sqrt(n)
    return Interval(n, mean, spread, mean - half, mean + half)


def percent(losses: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """Return 100 * (loss - reference) / reference for each seed or step that both have."""
    return {
        key: 100 * (loss - reference[key]) / reference[key]
        for key, loss in losses.items()
        if key in reference
    }


@dataclass(frozen=True)
class OverSteps:
    """How a difference develops within long runs.

    Attributes:
        last: the mean over the last quarter of the steps, in percent.
        doubling: the change per doubling of the steps, fitted to their last three quarters, in percentage
            points.
    """

    last: Interval
    doubling: Interval


def over_steps(differences: Mapping[int, Mapping[int, float]]) -> OverSteps | None:
    """Fit differences in percent, {seed: {step: d}}; return None for short runs and few logged steps."""
    last, slopes = [], []
    for by_step in differences.values():
        end = max(by_step)
        fitted = sorted(step for step in by_step if step > end / 4)
        if end < _LEAST_STEPS or len(fitted) < _LEAST_POINTS:
            continue
        slopes.append(float(np.polyfit(np.log2(fitted), [by_step[step] for step in fitted], 1)[0]))
        last.append(statistics.fmean(by_step[step] for step in fitted if step > 3 * end / 4))
    means, changes = interval(last), interval(slopes)
    return OverSteps(means, changes) if means and changes else None
