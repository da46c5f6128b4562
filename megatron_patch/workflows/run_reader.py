"""Reads a run's folder: config.yaml, metrics.jsonl, summary.json and failures/.

A run may have ended, be writing its last line, or have died before its first one: whatever its folder has is
read. Content that no run of this project writes is refused by an error of one line. `report`, `ablate`,
`compare` reads runs with this module.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.files import Unfit, load_json, load_yaml

UNCOMPRESSED = ("none", "stock")
_WARM_UP_RECORDS = 3
"""Medians leave out this many first records, as megatron/metrics.py does in the summary."""
_OF_RECORDS: dict[str, type] = {"raw_weight_gathers": dict}
_OF_SUMMARIES: dict[str, type] = {
    **dict.fromkeys(("steps", "world_size", "bits"), int),
    **dict.fromkeys(("method", "device"), str),
    **dict.fromkeys(("gradient_wire", "weight_wire", "step_seconds", "versions"), dict),
    **_OF_RECORDS,
}
"""The types of those values in summary.json that are not plain numbers; null is allowed everywhere."""


@dataclass(frozen=True)
class Run:
    """The content of a run's folder."""

    path: Path
    records: list[dict[str, Any]]
    """The records of metrics.jsonl, one for each logged step."""
    config_text: str
    """The text of config.yaml; empty if the run was started without one."""
    config: dict[str, Any]
    """The values of config.yaml by keys `section.key`."""
    summary: dict[str, Any]
    """The content of summary.json; empty until the run has ended."""
    failure: str | None
    """The first error that a rank wrote to failures/, if the run has no summary."""
    trial: list[dict[str, Any]]
    """The rows of trial.json (session/trial.py); none if the run has made no trial."""

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
        return int(self.summary.get("steps") or self._last.get("step", 0))

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("megatron.train_iters")
        return steps if isinstance(steps, int) else None

    @property
    def finished(self) -> bool:
        return bool(self.summary) and self.steps >= (self.planned_steps or 0)

    @property
    def state(self) -> str:
        """`finished`, or how far the run came and why it stopped, as far as known."""
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
        """Whether the run used the exact weight gather."""
        return "raw_weight_gathers" in (self.summary or self._last)

    @property
    def raw_gathers(self) -> dict[str, int]:
        """How often coded bucket groups were gathered in full, by reason (megatron/seams/traffic.py)."""
        return (self.summary or self._last).get("raw_weight_gathers") or {}

    @property
    def _last(self) -> dict[str, Any]:
        return self.records[-1] if self.records else {}

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """The run's numbers by column of the report's table, from the summary, or else from the records."""
        summary, last = self.summary, self._last
        gradients, weights = summary.get("gradient_wire") or {}, summary.get("weight_wire") or {}
        seconds = summary.get("step_seconds") or {}
        values: dict[str, Any] = {
            "train_loss": summary.get("train_loss", last.get("loss")),
            "valid_loss": summary.get("valid_loss"),
            "step_seconds": seconds.get("median", self._median("step_seconds")),
            "gradient_bits": gradients.get("bits_per_element", last.get("gradient_wire_bits_per_element")),
            "gradient_bytes": gradients.get("bytes_per_step", last.get("gradient_wire_bytes")),
            "weight_bits": weights.get("bits_per_element", self._mean_weight_bits()),
            "weight_bytes": weights.get("bytes_per_step", self._mean("weight_wire_bytes")),
            "error_bytes": summary.get("compensation_bytes"),
            "weight_gather_bytes": summary.get("weight_gather_bytes"),
            "tokens_per_second": summary.get("tokens_per_second", self._median("tokens_per_second")),
        }
        return {name: float(value) if is_number(value) else None for name, value in values.items()}

    def curve(self, key: str) -> dict[int, float]:
        """Return a value by step, of the records that have it; NaN and Inf become NaN."""
        return {
            record["step"]: float(record[key]) if math.isfinite(record[key]) else math.nan
            for record in self.records
            if is_number(record.get(key))
        }

    def _mean(self, key: str) -> float | None:
        values = self.curve(key).values()
        return statistics.fmean(values) if values else None

    def _mean_weight_bits(self) -> float | None:
        """Return all bytes divided by all weights, in bits, as in the summary."""
        nbytes, bits = self.curve("weight_wire_bytes"), self.curve("weight_wire_bits_per_element")
        weights = sum(nbytes[step] / bits[step] for step in nbytes if bits.get(step))
        return sum(nbytes.values()) / weights if weights else None

    def _median(self, key: str) -> float | None:
        values = [value for value in self.curve(key).values() if not math.isnan(value)]
        values = values[_WARM_UP_RECORDS:] or values
        return statistics.median(values) if values else None


def is_number(value: Any) -> bool:
    """Whether a value is a number; true, false and null are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return each run in and below `folders` once, in order; a folder's uncompressed runs come first."""
    by_path: dict[Path, Run] = {}
    for folder in folders:
        if folder.is_file():
            raise UserError(f"{folder} is a file; name the run's folder, e.g. {folder.parent}")
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        below = [read_run(path) for path in _run_folders(folder)]
        if not below:
            raise UserError(
                f"{folder} holds no run: neither it nor a folder below it has a metrics.jsonl, or a "
                "config.yaml with a command.txt; `megatron-loco train CONFIG --out DIR` leaves them in DIR"
            )
        for run in sorted(below, key=lambda run: run.method not in UNCOMPRESSED):
            by_path.setdefault(run.path.resolve(), run)
    return list(by_path.values())


def _run_folders(folder: Path) -> Iterator[Path]:
    for path, folders, files in folder.walk():
        if "metrics.jsonl" in files or {"config.yaml", "command.txt"} <= set(files):
            folders.clear()  # The folders of a run contain no runs.
            yield path
        # Numbers are compared as such: seed-2 comes before seed-10.
        folders.sort(key=lambda name: [(text, int(d or 0)) for text, d in re.findall(r"(\D*)(\d*)", name)])


def read_run(folder: Path) -> Run:
    summary = read_summary(folder)
    text, config = _read_config(folder / "config.yaml")
    failure = None if summary else _first_failure(folder / "failures")
    trial = _read_json(folder / "trial.json").get("rows") or []
    return Run(folder, read_records(folder), text, config, summary, failure, trial)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl of the run in `folder`; none if there is no such file."""
    path, records = folder / "metrics.jsonl", []
    lines = _text_of(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = load_json(line)
        except Unfit as error:
            if number == len(lines) and line.startswith("{"):
                break  # The run is writing this line, or was killed while it did.
            raise UserError(
                f"{path}: line {number} is no JSON: {line[:60]!r}; remove the line, or leave the run out"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}: line {number} is no record of a step: {line[:60]!r}; leave the run out")
        check_summary(record, f"{path}: line {number}", _OF_RECORDS)
        records.append(record)
    return records


def read_summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of the run in `folder`; empty if there is no such file."""
    content = _read_json(path := folder / "summary.json")
    check_summary(content, str(path))
    return content


def check_summary(content: Mapping[str, Any], where: str, kinds: Mapping[str, type] = _OF_SUMMARIES) -> None:
    """Check the types of a summary's, or a record's, values that are not plain numbers."""
    for key, kind in kinds.items():
        if not isinstance(value := content.get(key), kind | None):
            raise UserError(f"{where}: {key}: {value!r:.60} is no {kind.__name__}; leave the run out")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _text_of(path)
    try:
        content = load_json(text or "{}")
    except Unfit as error:
        raise UserError(f"{path} is no JSON: {text[:60]!r}; remove it, or leave the run out") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no summary of a run: {text[:60]!r}; remove it, or leave the run out")
    return content


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        # A run's config.yaml is resolved, so that OmegaConf, ten times slower than libyaml, is not needed.
        text, content = load_yaml(path)
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
    """Return the earliest of the errors that the ranks have written (megatron/run_script.py)."""
    errors = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(UserError):  # A rank may have been killed while it wrote.
            record = _read_json(path)
            if lines := str(record.get("error") or "").splitlines():
                errors.append((record.get("time", 0), lines[0]))
    return min(errors)[1] if errors else None
