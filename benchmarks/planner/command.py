"""`python -m benchmarks.planner`: steps of the network benchmark, measured and as the planner predicts them.

Prints the errors by rate, the seconds of every cell, and how often the fastest method is predicted: what
docs/plan.md shows. Nothing is run. check.py says what the predictions are made from.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.planner.check import Compared, compared, fastest

_DATA = Path(__file__).resolve().parents[2] / "docs" / "plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.planner`."""
    parser.add_argument(
        "--cells", type=Path, default=_DATA / "network.csv", metavar="FILE", help="as docs/plan/network.csv"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=_DATA / "calibration.yaml",
        metavar="FILE",
        help="of the machine that measured them, as docs/plan/calibration.yaml",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    cells = read(args.cells, args.calibration)
    print("| links | step: median | worst | within 20 % | speed-up: median | worst | within 8 % |")
    print("|" + " --- |" * 7, *errors(cells), sep="\n")
    for hosts, ranks in dict.fromkeys((c.cell.hosts, c.cell.ranks_per_host) for c in cells):
        chosen = [c for c in cells if (c.cell.hosts, c.cell.ranks_per_host) == (hosts, ranks)]
        rates = dict.fromkeys(_links(c) for c in chosen)
        print(f"\nSeconds of a step, measured / predicted. Hosts: {hosts}, ranks of each: {ranks}\n")
        print("| method | microbatches |", " | ".join(rates), "|")
        print("|" + " --- |" * (2 + len(rates)), *steps(chosen), sep="\n")
    print(f"\nThe fastest method was predicted on {choices(cells)} links and accumulation counts.")
    return 0


def read(cells: Path, calibration: Path) -> list[Compared]:
    """Return every cell of a file, with the planner's prediction from a calibration."""
    rates = yaml.safe_load(calibration.read_text(encoding="utf-8"))
    with cells.open(encoding="utf-8") as file:
        return compared(list(csv.DictReader(file)), rates)


def _links(one: Compared) -> str:
    return "unshaped" if one.cell.rate_mbit is None else f"{one.cell.rate_mbit:g} Mbit/s"


def errors(cells: Sequence[Compared]) -> list[str]:
    """Return table rows of the errors of steps and speed-ups, by rate and in all, without given cells."""
    cells = [c for c in cells if not c.cell.given]
    groups = {rate: [c for c in cells if _links(c) == rate] for rate in dict.fromkeys(map(_links, cells))}
    lines = []
    for title, chosen in [*groups.items(), ("all", cells)]:
        of_steps = [abs(c.error) for c in chosen]
        ratios = [abs(c.ratio_error) for c in chosen if c.ratio_error is not None]
        near, close = sum(e <= 0.2 for e in of_steps), sum(e <= 0.08 for e in ratios)
        lines.append(
            f"| {title} | {statistics.median(of_steps):.1%} | {max(of_steps):.1%} | "
            f"{near} of {len(of_steps)} | "
            f"{statistics.median(ratios):.1%} | {max(ratios):.1%} | {close} of {len(ratios)} |"
        )
    return lines


def steps(cells: Sequence[Compared]) -> list[str]:
    """Return table rows of the seconds of a step, measured / predicted, by rate."""
    rows: dict[tuple[str, int], list[str]] = {}
    for c in sorted(cells, key=lambda c: c.cell.accumulation):
        shown = f"{c.measured:.2f} / " + ("given" if c.cell.given else f"{c.predicted:.2f}")
        rows.setdefault((c.cell.name, c.cell.accumulation), []).append(shown)
    return [f"| {name} | {count} | {' | '.join(row)} |" for (name, count), row in rows.items()]


def choices(cells: Sequence[Compared]) -> str:
    """Return on how many of the shaped links the predicted fastest method was the fastest."""
    places = {place: names for place, names in fastest(cells).items() if place[2] is not None}
    return f"{sum(one == other for one, other in places.values())} of {len(places)} shaped"
