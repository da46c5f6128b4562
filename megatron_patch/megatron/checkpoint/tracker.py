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
_LAST = ("metadata.json", ".metadata", "mp_rank_*/model_optim_rng.pt")
"""What Megatron writes last of a checkpoint: in torch_dist, in torch_dcp and fsdp_dtensor, and in torch."""


def latest(checkpoints: Path) -> int | None:
    """Return the iteration that Megatron would load from a folder of checkpoints; None without one."""
    try:
        return int((checkpoints / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def repair(checkpoints: Path) -> None:
    """Write the newest checkpoint's number to a tracker file that a kill has left empty.

    Megatron empties the tracker file when it opens it for writing; all files of its checkpoint are complete
    by then, but there may be a newer folder that an asynchronous save was writing. With an empty tracker file
    every rank would end without an error. This function never raises, because other ranks wait for the one
    that repairs: a failure is logged, and every rank then raises its own error.
    """
    tracker = checkpoints / NAME
    try:
        if not tracker.exists() or tracker.read_bytes().strip():
            return
        folders = [path for path in checkpoints.iterdir() if _FOLDER.fullmatch(path.name)]
        of_torch_dist, of_dcp, of_torch = (
            [(path.stat().st_mtime_ns, folder.name) for folder in folders for path in folder.glob(last)]
            for last in _LAST
        )
        # torch_dist has a .metadata too, before it is complete.
        complete = (of_torch_dist or of_dcp) + of_torch
        if not complete:
            raise FileNotFoundError("no checkpoint beside it is complete")
        write_whole(tracker, str(int(max(complete)[1].removeprefix("iter_"))))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "megatron-loco: %s is empty, as a kill leaves it, and cannot be repaired: %s", tracker, error
        )
