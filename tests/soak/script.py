"""pretrain_gpt.py as a soaked run has it: each rank tells where it is, and dies on demand.

A few functions of Megatron's are wrapped by name: each sets the rank's phase on the board, and before or
after it is a point where an aimed kill may be due. Nothing that they compute is changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import checkpointing, training

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.soak.board import PHASE, PHASES, PID, STEPS, Board  # noqa: E402

RANK = int(os.environ["RANK"])
board = Board(Path(os.environ["SOAK_BOARD"]))
mine, due = board.row(RANK), board.due()
passed: Counter[str] = Counter()


def point(name: str) -> None:
    """A place where a kill may be due."""
    # Some places of a save are passed in other phases too.
    if name.startswith("save") and PHASES[mine[PHASE]] != "save":
        return
    passed[name] += 1
    if due is not None and (due.point, due.nth, due.rank) == (name, passed[name], RANK):
        board.kill(due)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    before, mine[PHASE] = mine[PHASE], PHASES.index(name)
    try:
        yield
    finally:
        mine[PHASE] = before


def wrap(owner: Any, name: str, shown: str | None = None, before: str = "", after: str = "") -> None:
    """Have owner.name set phase `shown` while it runs, with kill points before and after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with phase(shown) if shown else contextlib.nullcontext():
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
    wrap(training, "load_checkpoint", "load", before="load: begins", after="load: done")
    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        mine[STEPS] += 1
        mine[PHASE] = PHASES.index("compute")
        result = original(*args, **kwargs)
        mine[PHASE] = PHASES.index("between steps")
        point("step done")
        return result

    training.train_step = train_step
    # Between these two the bucket's exchange is under way, beside the backward pass.
    group = _ParamAndGradBucketGroup
    wrap(group, "start_grad_sync", "exchange", before="exchange: begins", after="exchange: under way")
    wrap(group, "finish_grad_sync", "exchange", before="exchange: awaited", after="exchange: done")
    optimizer = DistributedOptimizer
    wrap(optimizer, "step_with_ready_grads", "optimizer", before="optimizer: begins", after="optimizer: done")
    wrap(optimizer, "_copy_main_params_to_model_params", after="optimizer: weights not gathered")
    wrap(training, "save_checkpoint", "save", before="save: begins", after="save: announced")
    wrap(filesystem_async, "_write_item", after="save: inside a file")
    wrap(serialization, "save_config", before="save: no metadata")
    wrap(
        checkpointing,
        "get_checkpoint_tracker_filename",
        before="save: files complete",
        after="save: before tracker",
    )
    checkpointing.maybe_msc = TornTracker(checkpointing.maybe_msc)


mine[PID], mine[PHASE] = os.getpid(), PHASES.index("start-up")
wrap_everything()
runpy.run_path(str(ROOT / "pretrain_scripts" / "pretrain_gpt.py"), run_name="__main__")
