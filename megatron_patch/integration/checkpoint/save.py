"""Saving the error states of attached models with a checkpoint.

What a job remembers is more than the errors: the step counters (start_step, reset_interval) and the random
generators of stochastic rounding are saved, and put back by restore.py, with them.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from megatron_patch.errors import UserError
from megatron_patch.integration.checkpoint import files as sidecar
from megatron_patch.integration.checkpoint.element_map import rank_state_of
from megatron_patch.integration.checkpoint.files import RankFile
from megatron_patch.integration.seams.optimizer_step import loss_scale
from megatron_patch.session.manifest import content_of, gathered, listed

_STAGING = ".compression-"

_live: WeakSet[ErrorSave] = WeakSet()
"""Rank 0's saves that are neither in place nor discarded."""


class ErrorSave:
    """The error states of one checkpoint on their way to disk. Every rank makes one and calls the same.

    `start` (or `write`) writes this rank's file into a staging folder beside the checkpoint's, `complete`
    waits for all ranks and writes the manifest, `publish` moves the folder into the checkpoint.

    Args:
        chunks: the rank's attached DDP-wrapped chunks.
        checkpoint: the checkpoint's own folder (`iter_0000020`), which need not exist yet.
        iteration: of the checkpoint.
        optimizer: Megatron's; its loss scale is the errors' unit.

    Raises:
        UserError: on every rank, where the folder cannot be written.
    """

    def __init__(self, chunks: Sequence[Any], checkpoint: Path, iteration: int, optimizer: Any) -> None:
        self.checkpoint = checkpoint
        self._rank = rank_state_of(chunks)
        self._content = content_of(self._rank, iteration, loss_scale(optimizer))
        self._tensors = dict(self._rank.tensors())
        self._file: RankFile | None = None
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self.id = uuid.uuid4().hex  # rank 0's is all ranks'
        self._make_staging()

    @property
    def _staging(self) -> Path:
        return self.checkpoint.with_name(f"{_STAGING}{self.id}")

    def _make_staging(self) -> None:
        """Rank 0 makes an empty folder, named by an id that all ranks use, and removes what a kill left."""
        answer: list[str | None] = [self.id, None]
        if dist.get_rank() == 0:
            try:
                live = {save._staging for save in _live}  # an asynchronous one may not be final yet
                for left_over in set(self._staging.parent.glob(f"{_STAGING}*")) - live:
                    shutil.rmtree(left_over, ignore_errors=True)
                self._staging.mkdir(parents=True)
                _live.add(self)
            except OSError as error:
                answer[1] = error.strerror or str(error)
        dist.broadcast_object_list(answer, src=0)
        assert answer[0] is not None
        self.id = answer[0]
        self._refuse([(0, answer[1])])

    def write(self) -> None:
        """Write this rank's file; `complete` reports what goes wrong."""
        try:
            if self._tensors:
                tensors = {name: tensor.cpu() for name, tensor in self._tensors.items()}
                self._file = sidecar.write_rank_file(self._staging, dist.get_rank(), tensors)
        except OSError as error:
            self._problem = error.strerror or str(error)
        self._tensors = {}

    def start(self) -> None:
        """`write` in the background, from a copy of the states."""
        self._tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()}
        self._thread = threading.Thread(target=self.write, name="megatron-loco-save")
        self._thread.start()

    def complete(self) -> None:
        """Wait until all ranks have written, and vouch for it by the manifest.

        Raises:
            UserError: on every rank, where one could not write; nothing is left behind.
        """
        if self._thread is not None:
            self._thread.join()
        everyone = gathered(self._rank.layout, (self._problem, self._file))
        self._refuse([(rank, problem) for rank, ((problem, _), *_) in enumerate(everyone)])
        problem = None
        if dist.get_rank() == 0:
            try:
                sidecar.write_manifest(self._staging, self._manifest(everyone))
            except OSError as error:
                problem = error.strerror or str(error)
        answer = [problem]
        dist.broadcast_object_list(answer, src=0)
        self._refuse([(0, answer[0])])

    def _manifest(self, everyone: list[Any]) -> dict[str, Any]:
        files = [dataclasses.asdict(file) if file is not None else None for (_, file), *_ in everyone]
        return {"id": self.id, **self._content, **listed(files, everyone)}

    def publish(self) -> None:
        """On rank 0, after `complete` and before the checkpoint is announced: move it into place."""
        sidecar.publish(self._staging, self.checkpoint / sidecar.FOLDER)
        _live.discard(self)

    def discard(self) -> None:
        """Remove what is not in place."""
        if dist.get_rank() == 0:
            shutil.rmtree(self._staging, ignore_errors=True)
            _live.discard(self)

    def _refuse(self, problems: list[tuple[int, str | None]]) -> None:
        for rank, problem in problems:
            if problem is not None:
                self.discard()
                raise UserError(
                    f"the error state of rank {rank} could not be saved below {self.checkpoint.parent}: "
                    f"{problem}; the last complete checkpoint is still the latest"
                )
