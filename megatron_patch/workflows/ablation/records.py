"""Reads and writes an ablation's results.csv, a line per run, and results_curves.csv, a line per logged step.

A run that they contain need not be made again if its folder is gone. A line stands for every run of the same
configuration, whatever the cell's name, because the configuration's `digest` is a column. The files may come
from another user.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.workflows.ablation.definition import Run
from megatron_patch.workflows.run.configuration import RunConfig
from megatron_patch.workflows.run_reader import read_records

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
"""For each column, the keys of its number in a run's summary.json."""
_WHOLE = ("steps", "compensation_bytes", "world_size")
CURVE_COLUMNS = (
    *("cell", "seed", "step", "train_loss", "gradient_bits_per_element", "weight_bits_per_element"),
    CONFIGURATION,
)
Summaries = Mapping[str, dict[str, Any]]
"""The content of summary.json by the digest of the run's configuration."""


@dataclass(frozen=True)
class Point:
    """A logged step: its training loss (None or not finite after divergence), and bits sent per element."""

    step: int
    loss: float | None
    gradient_bits: float
    weight_bits: float


Curves = Mapping[str, Sequence[Point]]
"""The logged steps by the digest of the run's configuration."""


def digest(run: RunConfig) -> str:
    """Return 16 hexadecimal digits that identify a configuration.

    Compression options at their defaults are left out, so that an option of a later release changes no
    digest. So are restarts and the rendezvous, which do not affect what a run computes.
    """
    defaults = {option.name: option.default for option in dataclasses.fields(CompressionConfig)}
    defaults["start_step"] = 0  # The field's default is None, because it depends on the optimizer.
    compression, data, launch = run.compression.as_dict(), dataclasses.asdict(run.data), run.launch
    content = {
        "megatron": run.megatron,
        "attach": run.attach,
        "compression": {key: value for key, value in compression.items() if value != defaults[key]},
        "launch": [launch.device, launch.nproc_per_node, launch.nnodes, launch.script],
        "data": {k: value for k, value in data.items() if value is not None or k in ("path", "source")},
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def columns(run: RunConfig, summary: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the columns of a run beside its cell and state; they are empty without a summary."""
    row = {CONFIGURATION: digest(run)}
    for column, place in NUMBERS.items():
        value: Any = summary
        for key in place:
            value = None if value is None else value.get(key)
        row[column] = "" if value is None else repr(value)
    row["device"] = "" if summary is None else str(summary["device"])
    row["versions"] = "" if summary is None else json.dumps(summary["versions"])
    return row


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield file
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read(path: Path) -> Summaries:
    """Return the done runs in the results.csv at `path`; none if its release wrote no digests."""
    with _opened(path) as file:
        lines = csv.DictReader(file, strict=True)
        known = lines.fieldnames or []
        if not {"cell", "seed", "state"} <= set(known):
            raise UserError(f"{path}: no results.csv of `ablate`: it has no columns cell, seed and state")
        if CONFIGURATION not in known:
            return {}
        return {
            line[CONFIGURATION] or "": _summary(line, f"{path}, line {lines.line_num}")
            for line in lines
            if line["state"] == "done"
        }


def _summary(line: Mapping[str, str | None], where: str) -> dict[str, Any]:
    summary: dict[str, Any] = {"device": line.get("device") or ""}
    for column, (*sections, name) in NUMBERS.items():
        inner = summary
        for key in sections:
            inner = inner.setdefault(key, {})
        inner[name] = _number(line.get(column) or "", column, where)
    try:
        summary["versions"] = dict(json.loads(line.get("versions") or "{}").items())
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: versions: must be a JSON object") from error
    return summary


def _number(text: str, column: str, where: str) -> float | int | None:
    is_loss = column.endswith("_loss")  # The loss of a run that diverged is not finite.
    if is_loss and not text:
        return None
    with contextlib.suppress(ValueError):
        value = int(text) if column in _WHOLE else float(text)
        if is_loss or 0 <= value < math.inf:
            return value
    raise UserError(f"{where}: {column}: {text[:60]!r} is no number")


def beside(results: Path) -> Path:
    """Return the path of `results_curves.csv` that belongs to `results.csv`."""
    return results.with_name(f"{results.stem}_curves.csv")


def points_of(folder: Path) -> list[Point]:
    """Return the logged steps of a run; none if it has no metrics.jsonl."""
    wires = ("gradient_wire_bits_per_element", "weight_wire_bits_per_element")
    return [
        Point(record["step"], record.get("loss"), *(record.get(wire, 0.0) for wire in wires))
        for record in read_records(folder)
    ]


def losses(points: Sequence[Point]) -> dict[int, float]:
    """Return the finite losses by step."""
    return {p.step: p.loss for p in points if p.loss is not None and math.isfinite(p.loss)}


def curves_text(curves: Sequence[tuple[Run, Sequence[Point]]]) -> str:
    """Return the text of results_curves.csv; losses have six digits, bits three decimal places."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CURVE_COLUMNS)
    for run, points in curves:
        of_run = digest(run.configured)
        for point in points:
            loss = "" if point.loss is None else f"{point.loss:.6g}"
            bits = (f"{point.gradient_bits:.3f}", f"{point.weight_bits:.3f}")
            writer.writerow([run.cell.name, run.seed, point.step, loss, *bits, of_run])
    return file.getvalue()


def read_curves(path: Path) -> dict[str, list[Point]]:
    """Return the curves in the file at `path`; none if there is no such file."""
    curves: dict[str, list[Point]] = {}
    if not path.exists():
        return curves
    with _opened(path) as file:
        lines = csv.reader(file, strict=True)
        if tuple(next(lines, ())) != CURVE_COLUMNS:
            raise UserError(f"{path}: no file of curves: its columns must be {', '.join(CURVE_COLUMNS)}")
        for line in lines:
            try:
                _, _, step, loss, gradient, weight, of_run = line
                point = Point(int(step), float(loss) if loss else None, float(gradient), float(weight))
            except ValueError as error:
                raise UserError(f"{path}, line {lines.line_num}: {error}") from error
            curves.setdefault(of_run, []).append(point)
    return curves
