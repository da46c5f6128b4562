"""How an ablation's runs went, step by step: results_curves.csv, beside results.csv.

A line per run and logged step. A run is named by its configuration's digest, as in results.csv, so that the
pictures can be drawn again where the runs' folders are gone. The file may be another user's.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.workflows.ablation import records
from megatron_patch.workflows.ablation.definition import Run

COLUMNS = (
    "cell",
    "seed",
    "step",
    "train_loss",
    "gradient_bits_per_element",
    "weight_bits_per_element",
    records.CONFIGURATION,
)


@dataclass(frozen=True)
class Point:
    """A logged step: training loss (None or not finite where it diverged), bits on the wire per element."""

    step: int
    loss: float | None
    gradient_bits: float
    weight_bits: float


Curves = Mapping[str, Sequence[Point]]
"""By a configuration's digest."""


def beside(results: Path) -> Path:
    """`results_curves.csv` of `results.csv`."""
    return results.with_name(f"{results.stem}_curves.csv")


def of_folder(folder: Path) -> list[Point]:
    """From metrics.jsonl; nothing where there is none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        Point(
            record["step"],
            record["loss"],
            record.get("gradient_wire_bits_per_element", 0.0),
            record.get("weight_wire_bits_per_element", 0.0),
        )
        for record in map(json.loads, lines)
    ]


def losses(points: Sequence[Point]) -> dict[int, float]:
    """By step, where finite."""
    return {p.step: p.loss for p in points if p.loss is not None and math.isfinite(p.loss)}


def text(made: Sequence[tuple[Run, Sequence[Point]]]) -> str:
    """The file's text, with six digits of a loss and three of bits."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run, points in made:
        digest = records.digest(run.configured)
        for point in points:
            loss = "" if point.loss is None else f"{point.loss:.6g}"
            bits = (f"{point.gradient_bits:.3f}", f"{point.weight_bits:.3f}")
            writer.writerow([run.cell.name, run.seed, point.step, loss, *bits, digest])
    return file.getvalue()


def read(path: Path) -> dict[str, list[Point]]:
    """The curves in the file at `path`; none if there is no such file."""
    found: dict[str, list[Point]] = {}
    if not path.exists():
        return found
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file, strict=True)
            if tuple(next(lines, ())) != COLUMNS:
                raise UserError(f"{path}: no file of curves: its columns must be {', '.join(COLUMNS)}")
            for line in lines:
                if len(line) != len(COLUMNS):
                    raise UserError(f"{path}, line {lines.line_num}: {len(line)} columns of {len(COLUMNS)}")
                found.setdefault(line[-1], []).append(_point(line, f"{path}, line {lines.line_num}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return found


def _point(line: Sequence[str], where: str) -> Point:
    _, _, step, loss, gradient, weight, _ = line
    try:
        point = Point(int(step), float(loss) if loss else None, float(gradient), float(weight))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if not (math.isfinite(point.gradient_bits) and math.isfinite(point.weight_bits)):
        raise UserError(f"{where}: bits per element must be finite")
    return point
