"""Putting the error states of a Megatron checkpoint back into attached chunks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_patch.errors import UserError
from megatron_patch.integration.checkpoint import files as sidecar
from megatron_patch.integration.checkpoint.element_map import rank_state_of
from megatron_patch.integration.checkpoint.files import RankFile, RankTensors
from megatron_patch.integration.seams.optimizer_step import loss_scale
from megatron_patch.session.layouts import Damaged
from megatron_patch.session.rank_state import RankState
from megatron_patch.session.reader import Reader

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What Megatron has just loaded.

    `folder` is the checkpoint's, or None where errors are not to be looked for, and `without` says why.
    `id` is our part's, as the checkpoint's arguments name it; None where it was saved without.
    """

    folder: Path | None
    iteration: int
    id: str | None = None
    without: str = "the checkpoint has none"


def restore(chunks: Sequence[Any], checkpoint: Checkpoint, optimizer: Any) -> None:
    """Put the error states of a checkpoint back into attached chunks; says in one line what happened.

    Raises:
        UserError: on every rank, for a damaged state with `strict_load`.
    """
    rank = rank_state_of(chunks)
    rank.start_from_zero(checkpoint.iteration)  # whatever is not found
    if not _has_errors(checkpoint):
        _say(logging.INFO, f"errors start from zero: {checkpoint.without}", checkpoint)
        return
    reader = _FolderReader(rank, checkpoint)
    problem, exact = reader.look()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, exact))
    problems = [problem for problem, _ in everyone if problem is not None]
    if problems:
        if rank.config.strict_load:
            raise UserError(
                f"{problems[0]}; without --compression-strict-load the errors would start from zero"
            )
        _say(logging.WARNING, f"errors start from zero: {problems[0]}", checkpoint)
        return
    try:
        line = reader.apply(all(exact for _, exact in everyone), loss_scale(optimizer))
    except Damaged as problem:  # whole by its checksums, but not as a save writes it
        raise UserError(f"{checkpoint.folder}: {problem}; remove {sidecar.FOLDER}/ there") from problem
    _say(logging.INFO, line, checkpoint)


def _has_errors(checkpoint: Checkpoint) -> bool:
    """Whether there is a state, or should be one."""
    if checkpoint.folder is None:
        return False
    return checkpoint.id is not None or (checkpoint.folder / sidecar.FOLDER).exists()


def _say(level: int, line: str, checkpoint: Checkpoint) -> None:
    if dist.get_rank() == 0:
        logger.log(level, "megatron-loco: iteration %d: %s", checkpoint.iteration, line)


class _FolderReader:
    """A saved state in a checkpoint's folder: first `look`, then `apply`."""

    def __init__(self, rank: RankState, checkpoint: Checkpoint) -> None:
        assert checkpoint.folder is not None
        self._rank = rank
        self._id = checkpoint.id
        self._folder = checkpoint.folder / sidecar.FOLDER
        self._reader: _FileReader | None = None

    def look(self) -> tuple[str | None, bool]:
        """What is wrong with the files that this rank looks at (None: nothing), and whether one fits it."""
        try:
            manifest = sidecar.read_manifest(self._folder)
            if self._id not in (None, manifest.get("id")):
                raise Damaged(f"{self._folder} is of another checkpoint")
            self._reader = reader = _FileReader(self._rank, manifest, self._folder)
            reader.verify()
        except Damaged as problem:
            return str(problem), False
        return None, reader.fits

    def apply(self, exact: bool, loss_scale: float) -> str:
        """Reader.apply."""
        assert self._reader is not None
        return self._reader.apply(exact, loss_scale)


class _FileReader(Reader):
    def __init__(self, rank: RankState, manifest: dict[str, Any], folder: Path) -> None:
        super().__init__(rank, manifest, folder)
        self._folder = folder

    def _listed(self, saved_rank: int) -> RankFile | None:
        file = self._files[saved_rank]
        try:
            return file and RankFile(**file)
        except TypeError as error:
            raise Damaged(f"{self._folder} holds what this release does not know: {error!r}") from error

    def verify(self) -> None:
        """Raises Damaged. Under another layout a rank reads of many files: together all look at every one."""
        looked_at = set(range(dist.get_rank(), len(self._files), dist.get_world_size()))
        for place in looked_at | ({self.mine} if self.mine is not None else set()):
            listed = self._listed(place)
            if listed is not None:
                sidecar.verify(self._folder, listed)

    def tensors_of(self, saved_rank: int) -> RankTensors:
        listed = self._listed(saved_rank)
        assert listed is not None
        return RankTensors(self._folder, listed)
