"""Megatron's tracker file, latest_checkpointed_iteration.txt: the number of the checkpoint to load.

Megatron writes a checkpoint's files, then its number into the tracker, and loads the one named there: what a
killed save has left is never loaded, and overwritten when the run gets there again.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from megatron_patch.files import write_whole

NAME = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_[0-9]+")


def latest(checkpoints: Path) -> int | None:
    """The iteration that Megatron would load from a folder of checkpoints; None if there is none."""
    try:
        return int((checkpoints / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def repair(checkpoints: Path) -> None:
    """Write the number that a kill took away: Megatron opens the tracker file, which empties it, then writes.

    Every file of that checkpoint, the last one written, is complete by then. Left alone, the empty file has
    every rank end without an error. It never raises, since other ranks wait for the one that repairs: what
    cannot be repaired is logged, and is then every rank's own error.
    """
    tracker = checkpoints / NAME
    try:
        if not tracker.exists() or tracker.read_bytes().strip():
            return
        saved = [path for path in checkpoints.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
        if saved:
            newest = max(saved, key=lambda path: path.stat().st_mtime_ns)
            write_whole(tracker, str(int(newest.name.removeprefix("iter_"))))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "megatron-loco: %s is empty, as a kill leaves it, and cannot be repaired: %s", tracker, error
        )
