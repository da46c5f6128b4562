"""Does what compression costs depend on the model's size? A line through the results of several ablations.

    python benchmarks/error_feedback/trend_over_sizes.py compression.method=loco compression.bits=4 --at 1e9 \
        1.03e6=docs/ablations/long_runs_llama_1m.csv 3.4e6=docs/ablations/long_llama_3m.csv

Each PARAMETERS=FILE is a results.csv; of each, the one cell with these settings. Models of unlike text, steps
and learning rates differ in more than their size. At a size far from those measured the line is an
extrapolation.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from megatron_patch.workflows.ablation import trend
from megatron_patch.workflows.ablation.statistics import Interval


def differences(path: Path, settings: dict[str, str]) -> list[float]:
    """Percent against uncompressed of each seed of the cell.

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
    """Print each model's difference, the line's slope, and where it is at the size that was asked for."""
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
        line = trend.over_sizes(models, args.at)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for parameters, each in models:
        print(f"{parameters:.3g} parameters: {', '.join(f'{one:+.2f}' for one in each)} %")
    print(f"per doubling: {shown(line.doubling)} percentage points")
    print(f"at {args.at:.3g} parameters, an extrapolation: {shown(line.there)} %")


def shown(found: Interval) -> str:
    """`+0.01 (-0.05 to +0.07)`."""
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


if __name__ == "__main__":
    main()
