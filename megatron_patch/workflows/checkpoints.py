"""The checkpoints in a run's folder: Megatron's own, in FOLDER/checkpoints/iter_0000050 and so on.

Megatron writes a checkpoint's files, then its number to `latest_checkpointed_iteration.txt`, and loads the
one named there: what a killed save has left is never loaded, and overwritten when the run gets there again.
"""

from __future__ import annotations

from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"


def checkpoints(folder: Path) -> Path:
    """Where the run in `folder` keeps its checkpoints."""
    return folder / "checkpoints"


def latest_step(folder: Path) -> int | None:
    """The step of the checkpoint that Megatron would load, None if there is none."""
    try:
        return int((checkpoints(folder) / _TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def mend(folder: Path) -> None:
    """Write the number that a kill took away: Megatron opens the tracker file, which empties it, then writes.

    Every file of that checkpoint, the last one written, is complete by then. Left alone, the empty file has
    every rank end without an error.
    """
    tracker = checkpoints(folder) / _TRACKER
    if not tracker.exists() or tracker.read_text(encoding="utf-8").strip():
        return
    saved = sorted(tracker.parent.glob("iter_*"), key=lambda path: path.stat().st_mtime_ns)
    if not saved:
        return
    partial = tracker.with_suffix(".partial")
    partial.write_text(str(int(saved[-1].name.removeprefix("iter_"))), encoding="utf-8")
    partial.replace(tracker)
