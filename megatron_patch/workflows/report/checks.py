"""What a run writes into summary.json and metrics.jsonl, as far as the page calculates with it.

Numbers need no check: one that is none counts as not recorded (runs.is_missing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_patch.errors import UserError

_MEASURED = ("gradient_wire", "weight_wire", "step_seconds")
_COUNTED = ("raw_weight_gathers", "weight_bits_by_bucket")
"""By reason and by bucket; null where there is none."""
_COUNTS = ("steps", "world_size", "bits")
_TEXTS = ("method", "device")


def check_summary(summary: Mapping[str, Any], where: str) -> None:
    """See that the sections of a summary are mappings, counts whole numbers, and names text."""
    check_record(summary, where)
    for key in (*_MEASURED, "versions"):
        if not isinstance(summary.get(key, {}), dict):
            _refuse(where, key, summary[key], "mapping")
    for key in _COUNTS:
        if not (summary.get(key) is None or is_count(summary[key])):
            _refuse(where, key, summary[key], "whole number")
    for key in _TEXTS:
        if not isinstance(summary.get(key), str | None):
            _refuse(where, key, summary[key], "text")


def check_record(record: Mapping[str, Any], where: str) -> None:
    """See that what a record has by bucket or reason is a mapping of numbers."""
    for key in _COUNTED:
        found = record.get(key)
        if found is None:
            continue
        if not isinstance(found, dict) or not all(map(is_number, found.values())):
            _refuse(where, key, found, "mapping of numbers")


def _refuse(where: str, key: str, value: Any, kind: str) -> NoReturn:
    text = repr(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    raise UserError(f"{where}: {key}: {short} is no {kind}; leave the run out")


def is_number(value: Any) -> bool:
    """Whether it is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether it is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
