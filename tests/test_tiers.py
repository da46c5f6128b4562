"""What `make test` leaves out is named by files and functions that are there."""

from __future__ import annotations

import csv

import tiers


def test_marked_paths_and_listed_functions_exist() -> None:
    assert [
        path for paths in tiers.MARKED.values() for path in paths if not (tiers.HERE / path).exists()
    ] == []
    with tiers.DURATIONS.open(encoding="utf-8", newline="") as file:
        listed = [row["test"].split("::") for row in csv.DictReader(file)]
    gone = [
        f"{name}::{function}"
        for name, function in listed
        if not (tiers.HERE / name).exists()
        or f"def {function}(" not in (tiers.HERE / name).read_text(encoding="utf-8")
    ]
    assert gone == [], "python -m tests.tiers LOG writes durations.csv anew"
