"""pretrain_gpt.py as a soaked run has it: each rank tells where it is, and dies on demand.

A few functions of Megatron's are wrapped by name: before or after each is a point where an aimed kill may be
due. Nothing that they compute is changed.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import checkpointing, training

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.soak.board import PID, STEPS, Board  # noqa: E402

RANK = int(os.environ["RANK"])
board = Board(Path(os.environ["SOAK_BOARD"]))
mine, due = board.row(RANK), board.due()
passed: Counter[str] = Counter()
saving: list[bool] = []
"""Empty outside a save."""


def point(name: str) -> None:
    """A place where a kill may be due."""
    if name.startswith("save") and not saving:  # some places of a save are passed elsewhere too
        return
    passed[name] += 1
    if due is not None and (due.point, due.nth, due.rank) == (name, passed[name], RANK):
        board.kill(due)


def wrap(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Have kill points before and after owner.name."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            point(before)
        result = original(*args, **kwargs)
        if after:
            point(after)
        return result

    setattr(owner, name, wrapped)


class TornTracker:
    """Megatron's file access, with a kill point where the tracker file is open for writing, and empty."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str, mode: str = "r") -> Any:
        stream = self._files.open(path, mode)
        if mode == "w":
            point("save: tracker emptied")
        return stream


def wrap_everything() -> None:
    wrap(training, "load_checkpoint", before="load: begins", after="load: done")
    step, save = training.train_step, training.save_checkpoint

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        mine[STEPS] += 1
        result = step(*args, **kwargs)
        point("step done")
        return result

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        saving.append(True)
        point("save: begins")
        save(*args, **kwargs)
        point("save: announced")
        saving.clear()

    training.train_step, training.save_checkpoint = train_step, save_checkpoint
    # Between these two the bucket's exchange is under way, beside the backward pass.
    wrap(_ParamAndGradBucketGroup, "start_grad_sync", "exchange: begins", "exchange: under way")
    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", "exchange: awaited", "exchange: done")
    wrap(DistributedOptimizer, "step_with_ready_grads", "optimizer: begins", "optimizer: done")
    wrap(DistributedOptimizer, "_copy_main_params_to_model_params", after="optimizer: weights not gathered")
    wrap(filesystem_async, "_write_item", after="save: inside a file")
    wrap(serialization, "save_config", before="save: no metadata")
    tracker = "get_checkpoint_tracker_filename"
    wrap(checkpointing, tracker, "save: files complete", "save: before tracker")
    checkpointing.maybe_msc = TornTracker(checkpointing.maybe_msc)


mine[PID] = os.getpid()
wrap_everything()
runpy.run_path(str(ROOT / "pretrain_scripts" / "pretrain_gpt.py"), run_name="__main__")
