"""A difference that a page claims is that of two cells in a results file; a relative link resolves."""

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
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def measured(path: Path) -> set[tuple[str, ...]]:
    """Mean and bounds as written, and the verdict, of every cell against every other in a results.csv."""
    losses: dict[str, dict[int, float]] = {}
    steps = set()
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert row["state"] == "done", f"{path.name}: {row['cell']}, seed {row['seed']}"
            losses.setdefault(row["cell"], {})[int(row["seed"])] = float(row["valid_loss"])
            steps.add(int(row["steps"]))
    seeds = 3 if min(steps) >= 1000 else 5  # pairs of long runs differ less
    found = set()
    for first, second in itertools.permutations(losses.values(), 2):
        assert len(first) >= seeds
        assert first.keys() == second.keys()
        one = interval(list(percent(first, second).values()))
        assert one is not None
        found.add((*(f"{value:+.2f}" for value in (one.mean, one.low, one.high)), one.verdict))
    return found


@pytest.mark.parametrize("page", ["docs/ablations.md", "docs/bits.md", "docs/results.md", "README.md"])
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


def prose(page: Path) -> list[str]:
    """The lines of a page, without blocks of code."""
    pieces = page.read_text(encoding="utf-8").split("```")
    return [line for piece in pieces[::2] for line in piece.splitlines() if not line.startswith("    ")]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page: lower case, hyphens for spaces, no punctuation."""
    found: dict[str, int] = {}
    for line in prose(page):
        if heading := re.match(r"#+ (.*)", line):
            name = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            found[name] = found.get(name, -1) + 1
    return {f"{name}-{i}" if i else name for name, times in found.items() for i in range(times + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_to_a_file_and_a_heading(page: Path) -> None:
    for line in prose(page):
        for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), f"{link}: no such file"
            assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One block, from `g` to s\n## 1-bit Adam\n## 1-bit Adam\n```\n# code\n```\n    # code\n"
    )
    assert anchors(page) == {"one-block-from-g-to-s", "1-bit-adam", "1-bit-adam-1"}
