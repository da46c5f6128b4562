"""Every difference that a page claims is that of two cells in one of the results files in docs/ablations/."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path

import pytest

from megatron_patch.workflows.ablation.statistics import interval, percent

ROOT = Path(__file__).parents[1]
NUMBER = r"([+-]\d+\.\d\d)"
CLAIM = re.compile(rf"{NUMBER}(?: %)?,? \(?{NUMBER} to {NUMBER}(?:\)( \*\*0\*\*)?)?")
"""`+0.17 % (+0.06 to +0.29)`, `(+0.53 %, -0.08 to +1.13)`; in a table `-0.04 (-0.10 to +0.02) **0**`."""


def measured(path: Path) -> set[tuple[str, ...]]:
    """Mean and bounds as written, and the verdict, of every cell against every other in a results.csv."""
    losses: dict[str, dict[int, float]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert row["state"] == "done", f"{path.name}: {row['cell']}, seed {row['seed']}"
            losses.setdefault(row["cell"], {})[int(row["seed"])] = float(row["valid_loss"])
    found = set()
    for first, second in itertools.permutations(losses.values(), 2):
        assert len(first) >= 5
        assert first.keys() == second.keys()
        one = interval(list(percent(first, second).values()))
        assert one is not None
        found.add((*(f"{value:+.2f}" for value in (one.mean, one.low, one.high)), one.verdict))
    return found


@pytest.mark.parametrize("page", ["docs/ablations.md", "README.md"])
def test_differences_are_those_of_the_results(page: str) -> None:
    known = set().union(*map(measured, (ROOT / "docs/ablations").glob("*.csv")))
    claims = 0
    for line in (ROOT / page).read_text(encoding="utf-8").replace("\n  ", " ").splitlines():
        for *numbers, mark in CLAIM.findall(line):
            claims += 1
            verdicts = {verdict for *found, verdict in known if found == numbers}
            assert verdicts, f"{numbers} is no difference in docs/ablations/*.csv"
            if line.startswith("|"):
                assert any((verdict == "contains zero") == bool(mark) for verdict in verdicts), line
    assert claims
