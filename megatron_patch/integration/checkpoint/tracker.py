"""Megatron's tracker file, latest_checkpointed_iteration.txt: the number of the checkpoint to load.

Megatron writes a checkpoint's files, then its number into the tracker, and loads the one named there: what a
killed save has left is never loaded, and overwritten when the run gets there again.
"""

from __future__ import annotations

from pathlib import Path

from megatron_patch.files import write_whole

NAME = "latest_checkpointed_iteration.txt"


def latest(checkpoints: Path) -> int | None:
    """The iteration that Megatron would load from a folder of checkpoints; None if there is none."""
    try:
        return int((checkpoints / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def repair(checkpoints: Path) -> None:
    """Write the number that a kill took away: Megatron opens the tracker file, which empties it, then writes.

    Every file of that checkpoint, the last one written, is complete by then. Left alone, the empty file has
    every rank end without an error.
    """
    tracker = checkpoints / NAME
    if not tracker.exists() or tracker.read_text(encoding="utf-8").strip():
        return
    saved = sorted(checkpoints.glob("iter_*"), key=lambda path: path.stat().st_mtime_ns)
    if not saved:
        return
    write_whole(tracker, str(int(saved[-1].name.removeprefix("iter_"))))
