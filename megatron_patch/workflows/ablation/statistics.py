"""Paired differences: the same seed gives two cells the same initial weights and batches, and much of the
spread between seeds cancels. The interval is Student's t over the seeds' differences d_1 ... d_n:

    mean(d) +- t(n - 1, (1 + confidence) / 2) * sd(d) / sqrt(n)

It covers the true mean with that probability for one comparison looked at by itself; of twenty such intervals
around nothing at all, one misses zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


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
    from scipy import stats  # half a second

    spread = statistics.stdev(values)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * spread / math.sqrt(n)
    return Interval(n, mean, spread, mean - half, mean + half)


def percent(losses: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """By seed, 100 * (loss - reference) / reference, of the seeds that both have."""
    return {
        seed: 100 * (loss - reference[seed]) / reference[seed]
        for seed, loss in losses.items()
        if seed in reference
    }
