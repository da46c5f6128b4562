"""Reads and repairs Megatron's tracker file, latest_checkpointed_iteration.txt.

Megatron writes a checkpoint's files, then its number to the tracker file, and loads the checkpoint with that
number. So the files of a killed save are never loaded, and are overwritten when the run reaches that step.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from megatron_patch.files import write_whole

NAME = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_[0-9]+")


def latest(checkpoints: Path) -> int | None:
    """Return the iteration that Megatron would load from a folder of checkpoints; None without one."""
    try:
        return int((checkpoints / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def repair(checkpoints: Path) -> None:
    """Write the newest checkpoint's number to a tracker file that a kill has left empty.

    Megatron empties the tracker file when it opens it for writing; all files of the newest checkpoint are
    complete by then. With an empty tracker file every rank would end without an error. This function never
    raises, because other ranks wait for the one that repairs: a failure is logged, and every rank then raises
    its own error.
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
