"""results.csv read back: runs that it has need not be made again where their folders are gone.

A line counts for a run of the same configuration, whatever its cell is called: `digest` of it is a column.
The file may be another user's, so that nothing in it is believed without a check.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.untrusted import Unfit, check_numbers, load_json
from megatron_patch.workflows.run.configuration import RunConfig

CONFIGURATION = "configuration"
NUMBERS: dict[str, tuple[str, ...]] = {
    "valid_loss": ("valid_loss",),
    "test_loss": ("test_loss",),
    "train_loss": ("train_loss",),
    "steps": ("steps",),
    "gradient_bits_per_element": ("gradient_wire", "bits_per_element"),
    "gradient_bytes_per_step": ("gradient_wire", "bytes_per_step"),
    "weight_bytes_per_step": ("weight_wire", "bytes_per_step"),
    "compensation_bytes": ("compensation_bytes",),
    "weight_bits_per_element": ("weight_wire", "bits_per_element"),
    "world_size": ("world_size",),
}
"""Columns by the place of their number in a run's summary.json."""
_LOSSES = ("valid_loss", "train_loss", "test_loss")
_WHOLE = ("steps", "compensation_bytes", "world_size")
_TEXTS = ("device", "versions")
Records = Mapping[str, dict[str, Any]]
"""By a configuration's digest what summary.json said of its run."""


def digest(run: RunConfig) -> str:
    """16 hexadecimal digits that tell configurations apart.

    Options of compression that have their default are left out: one that a later release adds changes no
    digest. How ranks are restarted, and where they meet, does not matter to what a run computes.
    """
    defaults = {option.name: option.default for option in dataclasses.fields(CompressionConfig)}
    defaults["start_step"] = 0  # which has no default of its own since it depends on the optimizer
    launch = run.launch
    content = {
        "megatron": run.megatron,
        "attach": run.attach,
        "compression": {
            key: value for key, value in run.compression.as_dict().items() if value != defaults[key]
        },
        "launch": [launch.device, launch.nproc_per_node, launch.nnodes, launch.script],
        "data": {
            key: value
            for key, value in dataclasses.asdict(run.data).items()
            if value is not None or key in ("path", "source")
        },
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def columns(run: RunConfig, summary: Mapping[str, Any] | None) -> dict[str, str]:
    """What a line has of a run beside its cell and its state; empty where there is no summary."""
    found = {CONFIGURATION: digest(run)}
    for column, place in NUMBERS.items():
        value: Any = summary
        for key in place:
            value = None if value is None else value.get(key)
        found[column] = "" if value is None else repr(value)
    found["device"] = "" if summary is None else str(summary["device"])
    found["versions"] = "" if summary is None else json.dumps(summary["versions"])
    return found


def read(path: Path) -> Records:
    """The runs that are done by the file at `path`; none if it is of a release without configurations."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file, strict=True)
            known = lines.fieldnames or []
            if not {"cell", "seed", "state"} <= set(known):
                raise UserError(f"{path}: no results.csv of `ablate`: it has no columns cell, seed and state")
            if CONFIGURATION not in known:
                return {}
            done = [(lines.line_num, line) for line in lines if line["state"] == "done"]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return {line[CONFIGURATION] or "": _summary(line, f"{path}, line {number}") for number, line in done}


def _summary(line: Mapping[str, str | None], where: str) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for column, place in NUMBERS.items():
        value = _number(line.get(column) or "", column, where)
        inner = summary
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = value
    for column in _TEXTS:
        summary[column] = line.get(column) or ""
    try:
        versions = load_json(summary["versions"] or "{}")
    except Unfit:
        versions = None
    if not isinstance(versions, dict):
        raise UserError(f"{where}: versions: must be a JSON object")
    summary["versions"] = {str(name): str(version) for name, version in versions.items()}
    return summary


def _number(text: str, column: str, where: str) -> float | int | None:
    loss = column in _LOSSES  # of a run that diverged it is no finite number
    if loss and not text:
        return None
    try:
        value = int(text) if column in _WHOLE else float(text)
        check_numbers(value)
    except ValueError:
        value = None
    if value is None or not (loss or (math.isfinite(value) and value >= 0)):
        raise UserError(f"{where}: {column}: {text[:60]!r} is no number")
    return value
