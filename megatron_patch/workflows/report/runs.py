"""Runs' folders: found, and read as far as the runs have got.

A run may be over, still writing its last line, or dead before its first one: whatever its folder holds is
read, and only what no run of this project writes is an error.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.untrusted import Unfit, load_json, load_yaml, read_text
from megatron_patch.workflows.report import checks

UNCOMPRESSED = ("none", "stock")
_WARM_UP_RECORDS = 3
"""Left out of medians, as megatron/metrics.py leaves them out of the summary's."""


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    path: Path
    records: list[dict[str, Any]]
    """metrics.jsonl, a record for each logged step."""
    config_text: str
    """config.yaml; empty where the run was started without one."""
    config: dict[str, Any]
    """The same with keys `section.key`."""
    summary: dict[str, Any]
    """summary.json; empty as long as the run has not come to its end."""
    failure: str | None
    """The first error that a rank left, of a run without a summary."""

    @property
    def method(self) -> str | None:
        if "compression.attach" in self.config and not self.config["compression.attach"]:
            return "stock"
        return self.summary.get("method", self.config.get("compression.method"))

    @property
    def bits(self) -> int | None:
        if self.summary:
            return self.summary.get("bits")
        return None if self.method in UNCOMPRESSED else self.config.get("compression.bits")

    @property
    def seed(self) -> Any:
        return self.config.get("megatron.seed")

    @property
    def steps(self) -> int:
        done = self.records[-1]["step"] if self.records else 0
        return int(self.summary.get("steps") or done)

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("megatron.train_iters")
        return steps if isinstance(steps, int) else None

    @property
    def finished(self) -> bool:
        return bool(self.summary) and self.steps >= (self.planned_steps or 0)

    @property
    def state(self) -> str:
        """`finished`, or how far the run got and what is known of why."""
        if self.finished:
            return "finished"
        done = f"{self.steps} of {self.planned_steps} steps" if self.planned_steps else f"{self.steps} steps"
        if self.summary:
            return f"stopped after {done}"
        if self.failure is not None:
            return f"failed after {done}: {self.failure}"
        return f"unfinished after {done}: still running, or killed"

    @property
    def world_size(self) -> int | None:
        if "world_size" in self.summary:
            return self.summary["world_size"]
        ranks, nodes = (self.config.get(f"launch.{key}") for key in ("nproc_per_node", "nnodes"))
        return ranks * nodes if isinstance(ranks, int) and isinstance(nodes, int) else None

    @property
    def gathers_exactly(self) -> bool:
        """Whether the exact weight gather was on."""
        return "raw_weight_gathers" in self._latest

    @property
    def raw_gathers(self) -> dict[str, int]:
        """Coded bucket groups that were gathered in full, by reason (megatron/seams/weight_report.py)."""
        return self._latest.get("raw_weight_gathers") or {}

    @property
    def weight_bits_by_bucket(self) -> dict[str, float]:
        """Bits per weight, mean of the logged steps."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            for bucket, bits in (record.get("weight_bits_by_bucket") or {}).items():
                found.setdefault(bucket, []).append(bits)
        return {bucket: statistics.fmean(bits) for bucket, bits in found.items()}

    @property
    def _latest(self) -> dict[str, Any]:
        return self.summary or (self.records[-1] if self.records else {})

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """The summary's numbers, by the names of the table; from the records where there is no summary."""
        summary, last = self.summary, self.records[-1] if self.records else {}
        gradients, weights = summary.get("gradient_wire", {}), summary.get("weight_wire", {})
        wire = gradients.get("bytes_per_step", last.get("gradient_wire_bytes"))
        found = {
            "train_loss": summary.get("train_loss", last.get("loss")),
            "valid_loss": summary.get("valid_loss"),
            "step_seconds": summary.get("step_seconds", {}).get("median", self._median("step_seconds")),
            "gradient_bits": gradients.get("bits_per_element", last.get("gradient_wire_bits_per_element")),
            "gradient_bytes": wire,
            "weight_bits": weights.get("bits_per_element", self._mean_weight_bits()),
            "weight_bytes": weights.get("bytes_per_step", self._mean("weight_wire_bytes")),
            "error_bytes": summary.get("compensation_bytes"),
            "weight_gather_bytes": summary.get("weight_gather_bytes"),
            "tokens_per_second": summary.get("tokens_per_second", self._median("tokens_per_second")),
        }
        return {name: None if is_missing(value) else float(value) for name, value in found.items()}

    def curve(self, key: str) -> dict[int, float]:
        """Step -> value of the records that have one; NaN and Inf are kept as NaN."""
        return {
            record["step"]: float(record[key]) if math.isfinite(record[key]) else math.nan
            for record in self.records
            if not is_missing(record.get(key))
        }

    def _mean(self, key: str) -> float | None:
        values = list(self.curve(key).values())
        return statistics.fmean(values) if values else None

    def _mean_weight_bits(self) -> float | None:
        """As the summary has it: all bytes over all weights."""
        nbytes, bits = self.curve("weight_wire_bytes"), self.curve("weight_wire_bits_per_element")
        weights = sum(nbytes[step] / bits[step] for step in nbytes if bits.get(step))
        return sum(nbytes.values()) / weights if weights else None

    def _median(self, key: str) -> float | None:
        values = [value for value in self.curve(key).values() if not math.isnan(value)]
        values = values[_WARM_UP_RECORDS:] or values
        return statistics.median(values) if values else None


def is_missing(value: Any) -> bool:
    """Whether a value of a record or a summary is no number (null is allowed anywhere)."""
    return not checks.is_number(value)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in and below `folders`, each once, in this order; below a folder uncompressed ones first."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if folder.is_file():
            raise UserError(f"{folder} is a file; name the run's folder, e.g. {folder.parent}")
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        below = [_read_run(path) for path in _run_folders(folder)]
        if not below:
            raise UserError(
                f"{folder} holds no run: neither it nor a folder below it has a metrics.jsonl, or a "
                "config.yaml with a command.txt; `megatron-loco train CONFIG --out DIR` leaves them in DIR"
            )
        for run in sorted(below, key=lambda run: run.method not in UNCOMPRESSED):
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _run_folders(folder: Path) -> Iterator[Path]:
    for path, folders, files in folder.walk():
        if "metrics.jsonl" in files or {"config.yaml", "command.txt"} <= set(files):
            folders.clear()  # a run's own folders hold no runs
            yield path
        folders.sort(key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """seed-2 before seed-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _read_run(path: Path) -> Run:
    summary = _read_json(path / "summary.json")
    checks.check_summary(summary, str(path / "summary.json"))
    failure = None if summary else _first_failure(path / "failures")
    text, config = _read_config(path / "config.yaml")
    return Run(path, _read_records(path / "metrics.jsonl"), text, config, summary, failure)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read_records(path: Path) -> list[dict[str, Any]]:
    records = []
    text = _read_text(path)
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = load_json(line)
        except Unfit as error:
            if number == len(lines) and line.startswith("{"):
                break  # the run is writing it, or was killed as it did
            raise UserError(
                f"{path}: line {number} is no JSON: {line[:60]!r}; remove the line, or leave the run out"
            ) from error
        if not isinstance(record, dict) or not checks.is_count(record.get("step")):
            raise UserError(f"{path}: line {number} is no record of a step: {line[:60]!r}; leave the run out")
        checks.check_record(record, f"{path}: line {number}")
        records.append(record)
    return records


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        content = load_json(text or "{}")
    except Unfit as error:
        raise UserError(f"{path} is no JSON: {text[:60]!r}; remove it, or leave the run out") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no summary of a run: {text[:60]!r}; remove it, or leave the run out")
    return content


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        # What a run wrote is resolved already: no need of OmegaConf, which is ten times slower than libyaml.
        content = load_yaml(text := read_text(path))
    except FileNotFoundError:
        return "", {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Unfit as error:
        raise UserError(f"{path} is no YAML: {error}; leave the run out") from error
    return text, dict(_flat(content)) if isinstance(content, dict) else {}


def _flat(content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _first_failure(folder: Path) -> str | None:
    """The earliest error among those that the ranks left (workflows/run/launcher.py)."""
    errors = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(UserError):  # a rank that was killed as it wrote
            record = _read_json(path)
            if lines := str(record.get("error") or "").splitlines():
                time = record.get("time", 0)
                errors.append((0 if is_missing(time) or math.isnan(time) else time, lines[0]))
    return min(errors)[1] if errors else None
