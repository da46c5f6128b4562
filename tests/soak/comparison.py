"""Whether a disturbed run ended as the undisturbed one did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_patch.workflows.run import run_folder


def differences(undisturbed: Path, disturbed: Path) -> list[str]:
    """What of `disturbed` is not as in `undisturbed`, in words."""
    found = []
    one, other = (_metrics(folder) for folder in (undisturbed, disturbed))
    if [record[0] for record in other] != [record[0] for record in one]:
        found.append(f"{disturbed.name}: metrics.jsonl has steps {[record[0] for record in other]}")
    for left, right in zip(one, other, strict=False):
        if left != right:
            found.append(f"{disturbed.name}: step {left[0]}: {left[1:]} became {right[1:]}")
            break
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (undisturbed, disturbed)]
    for key in ("steps", "train_loss", "valid_loss", "gradient_wire", "weight_wire", "compensation_bytes"):
        if summaries[0][key] != summaries[1][key]:
            found.append(f"{disturbed.name}: summary's {key}: {summaries[0][key]} became {summaries[1][key]}")
    left, right = (_checkpoint(folder) for folder in (undisturbed, disturbed))
    wrong = [key for key in left.keys() | right.keys() if not _same(left.get(key), right.get(key))]
    if wrong:
        found.append(f"{disturbed.name}: last checkpoint: {len(wrong)} tensors differ, e.g. {wrong[0]}")
    return found


def _metrics(folder: Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def _checkpoint(folder: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint: weights and optimizer state."""
    saved = folder / "checkpoints"
    path = saved / f"iter_{run_folder.latest_step(saved):07d}"
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata.items()
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
