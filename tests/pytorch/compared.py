"""What ranks have recorded of their exchanges (runs.py), compared with the simulation's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.loco_float64 import LoCoSimulation

Labels = Callable[[dict[str, Any]], np.ndarray]
"""The blocks of an entry's elements (block_labels)."""


def _compare(
    reports: list[dict[str, Any]],
    compression: dict[str, Any],
    make: Callable[[dict[str, Any], dict[str, Any]], Any],
    check: Callable[[Any, list[dict[str, Any]]], None],
) -> int:
    agreements: dict[str, Any] = {}
    ends = reports[0]["steps"]
    assert len(reports[0]["record"]) == ends[-1] > 0
    names = ("bits", "codec", "error_dtype", "reset_interval")
    options = {"bits": 4} | {name: compression[name] for name in names if name in compression}
    for number, entries in enumerate(zip(*(report["record"] for report in reports), strict=True)):
        first = entries[0]
        if first["key"] not in agreements:
            own = options | {"average": first["average"], "gradient_dtype": first["dtype"]}
            agreements[first["key"]] = make(first, own)
        check(agreements[first["key"]], entries)
        if number + 1 in ends:
            for agreement in agreements.values():
                agreement.end_step()
    return len(agreements)


def compare_reduce_scatters(
    reports: list[dict[str, Any]], compression: dict[str, Any], labels_of: Labels
) -> int:
    """All entries of all ranks; returns how many exchanges there are."""

    def make(first: dict[str, Any], options: dict[str, Any]) -> Agreement:
        labels = labels_of(first)
        return Agreement(LoCoSimulation(len(reports), len(first["in"]), labels=labels, **options))

    def check(agreement: Agreement, entries: list[dict[str, Any]]) -> None:
        agreement.exchange(_rows(entries, "in"), sent=_rows(entries, "sent"), shards=_rows(entries, "out"))

    return _compare(reports, compression, make, check)


def compare_all_reduces(reports: list[dict[str, Any]], compression: dict[str, Any], labels_of: Labels) -> int:
    """The same of all-reduces."""

    def make(first: dict[str, Any], options: dict[str, Any]) -> AllReduceAgreement:
        return AllReduceAgreement(len(reports), len(first["in"]), labels=labels_of(first), **options)

    def check(agreement: AllReduceAgreement, entries: list[dict[str, Any]]) -> None:
        assert entries[0]["average"]
        sent = _rows(entries, "sent")[:, : len(entries[0]["in"])]
        held = agreement.exchange(_rows(entries, "in"), sent=sent)
        assert all(np.array_equal(entry["out"].numpy(), held) for entry in entries)

    return _compare(reports, compression, make, check)


def _rows(entries: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.stack([entry[name].numpy() for entry in entries])
