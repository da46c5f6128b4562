"""Paired differences: the same seed gives two cells the same initial weights and batches, and much of the
spread between seeds cancels. The interval is Student's t over the seeds' differences d_1 ... d_n:

    mean(d) +- t(n - 1, (1 + confidence) / 2) * sd(d) / sqrt(n)

It covers the true mean with that probability for one comparison looked at by itself; of twenty such intervals
around nothing at all, one misses zero.

Whether the cost of compression grows with the length of a run: for each seed, by least squares, where d is
the difference in training loss in percent, d(step) = a + g log2(step). g is the change per doubling; its
interval is over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_LEAST_STEPS = 1000
"""The warm-up is too large a part of shorter runs."""
_LEAST_POINTS = 8
OVER_STEPS = (
    "Over the steps: training loss against the baseline of the same seed, in percent, in the last quarter of "
    "the steps; and how that difference changes each time the steps double, by a fit to the last three "
    "quarters, in percentage points"
)


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds, its spread and its confidence interval; bounds are None for fewer than 2 seeds."""

    n: int
    mean: float
    spread: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Whether the interval excludes zero."""
        if self.low is None or self.high is None:
            return "one seed"
        if self.low <= 0 <= self.high:
            return "contains zero"
        return "worse" if self.mean > 0 else "better"


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the mean of `values`; None of none."""
    if not values:
        return None
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Interval(1, mean, 0.0, None, None)
    from scipy import stats  # It takes half a second.

    spread = statistics.stdev(values)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * spread / math.sqrt(n)
    return Interval(n, mean, spread, mean - half, mean + half)


def percent(losses: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """By seed or step, 100 * (loss - reference) / reference, of those that both have."""
    return {
        key: 100 * (loss - reference[key]) / reference[key]
        for key, loss in losses.items()
        if key in reference
    }


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
    """How differences in percent, {seed: {step: d}}, go on; None for short runs and few logged steps."""
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
