"""Fits a line through several ablations' results: how the cost of compression depends on the model's size.

    python benchmarks/error_feedback/trend_over_sizes.py compression.method=loco compression.bits=4 --at 1e9 \
        1.03e6=docs/ablations/long_runs_llama_1m.csv 3.4e6=docs/ablations/long_llama_3m.csv

Each PARAMETERS=FILE is a results.csv; the one cell with these settings is taken from it. The line goes
through all seeds' differences d in percent, by least squares: d = a + g log2(parameters), with the intervals
of a regression. Models with other texts, steps and learning rates differ in more than their size. At a size
far from those measured the line is an extrapolation; its interval assumes that it is straight up to there.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from megatron_patch.workflows.ablation.statistics import CONFIDENCE, Interval


@dataclass(frozen=True)
class OverSizes:
    """A line through the differences of several models.

    Attributes:
        doubling: the change per doubling of the parameters, percentage points.
        there: the line's value at the requested size, in percent.
    """

    doubling: Interval
    there: Interval


def over_sizes(differences: Sequence[tuple[float, Sequence[float]]], parameters: float) -> OverSizes:
    """Fit the line through [(a model's parameters, its seeds' differences in percent)].

    `parameters` is the size at which `there` is evaluated.

    Raises:
        ValueError: there are fewer than two sizes, or fewer than three differences.
    """
    points = [(math.log2(size), one) for size, each in differences for one in each]
    if len({x for x, _ in points}) < 2 or len(points) < 3:
        raise ValueError("a line needs two sizes, and its interval three runs")
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


def differences(path: Path, settings: dict[str, str]) -> list[float]:
    """Return each seed's difference to uncompressed training, in percent, of the cell with these settings.

    Raises:
        ValueError: no cell, or more than one, has these settings.
    """
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "done"]
    rows = [row for row in rows if all(row.get(key) == value for key, value in settings.items())]
    cells = {row["cell"] for row in rows}
    if len(cells) != 1:
        raise ValueError(
            f"{path}: {len(cells)} cells have these settings; there must be one: {sorted(cells)}"
        )
    return [float(row["difference_percent"]) for row in rows]


def main() -> None:
    """Print each model's difference, the line's slope, and its value at the requested size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", metavar="PARAMETERS=FILE or SETTING=VALUE")
    parser.add_argument("--at", type=float, default=1e9, help="parameters; default 1e9")
    args = parser.parse_intermixed_args()
    pairs = [one.partition("=")[::2] for one in args.pairs]
    settings = {key: value for key, value in pairs if key[:1].isalpha()}
    try:
        models = [
            (float(key), differences(Path(value), settings)) for key, value in pairs if not key[:1].isalpha()
        ]
        line = over_sizes(models, args.at)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for parameters, each in models:
        print(f"{parameters:.3g} parameters: {', '.join(f'{one:+.2f}' for one in each)} %")
    print(f"per doubling: {shown(line.doubling)} percentage points")
    print(f"at {args.at:.3g} parameters, an extrapolation: {shown(line.there)} %")


def shown(found: Interval) -> str:
    """Format an interval as `+0.01 (-0.05 to +0.07)`."""
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


if __name__ == "__main__":
    main()
