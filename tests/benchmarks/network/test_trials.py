"""The page's table of turns within a run is that of its data."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.network.trials import markdown

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_has_the_table_of_its_data() -> None:
    runs = json.loads((DOCS / "benchmarks" / "trials.json").read_text())["runs"]
    runs.sort(key=lambda run: (run["rate_mbit"] or float("inf"), run["run"]))
    table, sums = markdown(runs).split("\n\n", 1)
    page = (DOCS / "benchmarks.md").read_text()
    assert table in page
    for said in ("15 of 15 runs", "49 of 50 cases"):
        assert said in sums
        assert said in page
