"""Whether the cost of compression grows with the length of a run.

For each seed, by least squares, where d is the difference in training loss in percent:

    d(step) = a + g log2(step)

g is the change per doubling; its interval is Student's t over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_patch.workflows.ablation.statistics import Interval, interval

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
