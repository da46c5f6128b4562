"""Writes runs' folders as `megatron-loco train` leaves them, for the tests of `megatron-loco report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSIONS = {"python": "3.12.1", "megatron-loco": "0.1.0", "megatron-core": "0.19.2", "torch": "2.15.0"}


def write_run(
    folder: Path,
    method: str = "loco",
    bits: int = 4,
    seed: int = 1,
    *,
    logged: int = 20,
    planned: int = 100,
    valid_loss: float | None = 2.0,
    finished: bool = True,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    exact: dict[str, int] | None = None,
) -> Path:
    """A run that logs every fifth step; without `finished` it has no summary. Returns the folder.

    With `exact` it gathers bf16 weights exactly, in fewer bits from step to step, but for these gathers.
    """
    folder.mkdir(parents=True)
    compresses = method not in ("none", "stock")
    settings = {"megatron.seed": seed, "megatron.train_iters": planned, "megatron.lr": 0.002}
    settings |= {"compression.attach": method != "stock", "compression.method": method}
    settings |= {"compression.bits": bits, "launch.device": "cpu", "launch.nproc_per_node": 4}
    settings |= {"launch.nnodes": 1, "data.path": None, **(config or {})}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    (folder / "config.yaml").write_text(json.dumps(sections))  # JSON is YAML
    (folder / "command.txt").write_text("torchrun ...\n")
    wire = 1_400_000.0 * (bits / 32 if compresses else 1)
    records = [
        {
            "step": step,
            "loss": 5 / step**0.2 + 0.01 * seed + 0.002 * (8 - bits) * compresses,
            "grad_norm": 1.0,
            "step_seconds": 0.25 + 0.01 * (step % 3),
            "tokens_per_second": 16000.0,
            "compressed": compresses,
            "compression_seconds": 0.003,
            "gradient_wire_bytes": wire,
            "gradient_wire_bits_per_element": bits if compresses else 32.0,
            "weight_wire_bytes": 1_400_000.0,
            "weight_wire_bits_per_element": 32.0,
            "compression_snr_db": 4.0 * bits + 0.01 * (step % 7) if compresses else None,
            "compensation_norm_ratio": 0.05 + 0.001 * (step % 5) if compresses else None,
        }
        for step in range(5, 5 * logged + 1, 5)
    ]
    weight_wire = {"bytes_per_step": 1_400_000.0, "bits_per_element": 32.0}
    coded: dict[str, Any] = {}
    if exact is not None:
        weight_wire, coded = _gather_exactly(records, exact)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if finished:
        content = {
            "method": method,
            "bits": bits if compresses else None,
            "world_size": 4,
            "steps": 5 * logged,
            "train_loss": records[-1]["loss"],
            "valid_loss": valid_loss,
            "step_seconds": {"median": 0.26},
            "tokens_per_second": 15837.4,
            "gradient_wire": {"bytes_per_step": wire, "bits_per_element": bits if compresses else 32.0},
            "weight_wire": weight_wire,
            **coded,
            "compensation_bytes": 483224 if compresses else 0,
            "device": "cpu (x86_64)",
            "versions": VERSIONS,
            **(summary or {}),
        }
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def _gather_exactly(
    records: list[dict[str, Any]], raw: dict[str, int]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Put into `records` what the exact weight gather leaves there; returns what the summary has of it."""
    for number, record in enumerate(records):
        bits = 6.0 - 4 * number / len(records)
        record |= {
            "weight_wire_bytes": bits * 43_750,
            "weight_wire_bits_per_element": bits,
            "weight_unchanged_share": 0.2 + 0.5 * number / len(records),
            "weight_message_bits_per_element": bits - 0.5,
            "raw_weight_gathers": raw,
        }
    mean = sum(record["weight_wire_bits_per_element"] for record in records) / len(records)
    names = ("weight_unchanged_share", "raw_weight_gathers")
    last = {name: records[-1][name] for name in names}
    coded = {"weight_gather": "exact", **last, "weight_gather_bytes": 254979}
    return {"bytes_per_step": mean * 43_750, "bits_per_element": mean}, coded
