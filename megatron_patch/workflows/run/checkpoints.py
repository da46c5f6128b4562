"""The checkpoints in a run's folder: Megatron's own, in FOLDER/checkpoints/iter_0000050 and so on."""

from __future__ import annotations

from pathlib import Path

from megatron_patch.integration.checkpoint import tracker


def checkpoints(folder: Path) -> Path:
    """Where the run in `folder` keeps its checkpoints."""
    return folder / "checkpoints"


def latest_step(folder: Path) -> int | None:
    """The step of the checkpoint that Megatron would load, None if there is none."""
    tracker.repair(checkpoints(folder))
    return tracker.latest(checkpoints(folder))
