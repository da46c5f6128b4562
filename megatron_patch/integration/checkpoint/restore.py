"""Putting saved error states back: exactly, or under another layout.

Whether a state can be put back is decided by all ranks together, so that they never continue with errors of
different checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.compensation.resharding import Part, SavedState, reshard
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.integration.checkpoint import files as sidecar
from megatron_patch.integration.checkpoint.checks import check_manifest
from megatron_patch.integration.checkpoint.files import Damaged, RankFile, RankLayout, RankTensors, Storage
from megatron_patch.integration.checkpoint.rank_state import RankState
from megatron_patch.integration.seams.optimizer_step import loss_scale
from megatron_patch.session.events import Events
from megatron_patch.session.onset import Onset, Phase

logger = logging.getLogger(__name__)


class Tensors(Protocol):
    """The tensors of a saved rank."""

    def of(self, state: int) -> dict[str, torch.Tensor]:
        """Those of its state by number."""


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
    rank = RankState(chunks)
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


class Reader:
    """One rank's view of a saved state, given its manifest.

    A subclass says where tensors are, by `tensors_of`.

    Args:
        rank: the state of this rank.
        manifest: as save.py makes it.
        where: what holds it, for messages.

    Raises:
        Damaged: the manifest holds what this release does not know.
    """

    def __init__(self, rank: RankState, manifest: dict[str, Any], where: Any) -> None:
        self._rank = rank
        self._manifest = manifest
        try:
            check_manifest(manifest, sidecar.rank_file_name)
            shared = [RankLayout.from_json(layout) for layout in manifest["layouts"]]
            self._layouts = [shared[rank["layout"]].at(rank["positions"]) for rank in manifest["ranks"]]
            self._files = [rank["file"] for rank in manifest["ranks"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Damaged(f"{where} holds what this release does not know: {error}") from error
        same = [place for place, layout in enumerate(self._layouts) if layout == rank.layout]
        here = dist.get_rank()
        self.mine = here if here in same else next(iter(same), None)
        """The saved rank whose state is of the same elements as this one's."""

    @property
    def fits(self) -> bool:
        """Whether a saved rank's state is this rank's. If so on all ranks, all is put back exactly."""
        return len(self._files) == dist.get_world_size() and self.mine is not None

    def tensors_of(self, saved_rank: int) -> Tensors:
        """The tensors of a saved rank that has some."""
        raise NotImplementedError

    def overlapping(self) -> list[int]:
        """The saved ranks that hold elements of this rank's parameters, and have tensors."""
        return [
            saved
            for saved, (layout, file) in enumerate(zip(self._layouts, self._files, strict=True))
            if file and any(self._shares(part, storage) for part, storage in layout.states)
        ]

    def _shares(self, part: Part, storage: Storage) -> bool:
        return storage.dtype is not None and not self._keys.isdisjoint(piece.key for piece in part.pieces)

    @functools.cached_property
    def _keys(self) -> set[str]:
        return {piece.key for part, _ in self._rank.layout.states for piece in part.pieces}

    def apply(self, exact: bool, loss_scale: float) -> str:
        """Put the state back as far as it goes; returns what happened. Call on all ranks."""
        manifest, rank = self._manifest, self._rank
        rank.start_from_zero(manifest["steps"])
        for state in rank.states:
            state.steps_seen = manifest["steps_seen"]
            state.events = Events(**manifest["events"])
            state.onset = Onset.of_manifest(manifest, state.config)
        saved = manifest["config"]
        # What is pending is e / (1 - beta): another beta leaves it as it is.
        beta = saved.get("error_beta", rank.config.beta)
        factor = loss_scale / manifest["loss_scale"] * (1 - rank.config.beta) / (1 - beta)
        if saved["method"] != rank.config.method:
            return f"errors start from zero: the checkpoint is of method {saved['method']}"
        for state in rank.states:
            state.phase = _resumed(Phase(**manifest.get("phase", {})), state.config)
        if manifest["mid_step"]:
            for state in rank.states:
                state.events.replays += 1
            return "errors start from zero: the checkpoint is from within a step, which runs again"
        if exact:
            self._apply_exactly(factor)
        if not rank.config.keeps_errors:
            return "step counters restored; this method keeps no errors"
        if not saved["save_error"]:
            return "errors start from zero: they were not saved (compression.save_error: false)"
        if exact:
            return "error states restored exactly"
        return self._reshard(factor)

    def _apply_exactly(self, factor: float) -> None:
        assert self.mine is not None
        if not self._files[self.mine]:
            return
        tensors = self.tensors_of(self.mine)
        for number, sender in enumerate(self._rank.senders):
            found = tensors.of(number)
            generator = found.pop("generator", None)
            if sender.error is not None and found:
                self._put_back(number, sender.error, found)
                if factor != 1.0:
                    sender.error.scale_by(factor)
            if sender.generator is None or generator is None:
                continue
            if generator.numel() == sender.generator.get_state().numel():  # else of another device
                try:
                    sender.generator.set_state(generator)
                except (RuntimeError, TypeError) as error:
                    raise Damaged(f"state {number} has no state of a random generator") from error

    @staticmethod
    def _put_back(number: int, error: MovingAverageError, found: dict[str, torch.Tensor]) -> None:
        try:
            error.restore(found)
        except ValueError as problem:
            raise Damaged(f"state {number}: {problem}") from problem

    def _reshard(self, factor: float) -> str:
        new = [part for part, _ in self._rank.layout.states]
        lost = total = 0
        for sender, (values, missing) in zip(
            self._rank.senders, _or_damaged(reshard(new, self._saved_states())), strict=True
        ):
            assert sender.error is not None
            sender.error.set(values * factor)
            lost += missing
            total += values.numel()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (lost, total, self._same_senders(new)))
        lost, total = (sum(counts[place] for counts in everyone) for place in (0, 1))
        if all(same for *_, same in everyone):
            how = "every sender keeps its own"
        else:
            how = "where their number changed, senders start from the mean of the old ones"
        rest = f"; {lost:,} of {total:,} elements start from zero" if lost else ""
        groups = self._rank.groups()
        changed = [f"{name} {n} -> {groups[name]}" for name, n in self._manifest["groups"].items()]
        changed = [text for text, name in zip(changed, groups, strict=True) if self._changed(name)]
        why = f" ({', '.join(changed)})" if changed else ""
        return f"error states carried over to another layout{why}: {how}{rest}"

    def _changed(self, group: str) -> bool:
        return bool(self._manifest["groups"][group] != self._rank.groups()[group])

    def _same_senders(self, new: Sequence[Part]) -> bool:
        """Whether every element of this rank has as many senders as before."""
        old = {
            (piece.key, part.kind, part.senders)
            for layout in self._layouts
            for part, _ in layout.states
            for piece in part.pieces
        }
        return all((piece.key, part.kind, part.senders) in old for part in new for piece in part.pieces)

    def _saved_states(self) -> Iterator[SavedState]:
        """The saved states that hold elements of this rank's parameters."""
        for saved in self.overlapping():
            tensors = self.tensors_of(saved)
            for number, (part, storage) in enumerate(self._layouts[saved].states):
                if self._shares(part, storage):
                    yield part, _read_later(tensors, number, part, storage)


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


def _or_damaged(states: Iterator[tuple[torch.Tensor, int]]) -> Iterator[tuple[torch.Tensor, int]]:
    try:
        yield from states
    except (RuntimeError, ValueError) as problem:  # of torch: a view that does not fit, memory
        raise Damaged(f"no error states as a save writes them: {str(problem).splitlines()[0]}") from problem


def _resumed(phase: Phase, config: CompressionConfig) -> Phase:
    """The saved phase; a warm-up that is not over ends when the options of this run say.

    Checkpoints of releases before 0.3 have the step that was planned.
    """
    if phase.variance_steps is None and config.warmup_steps is not None:
        phase.switch_step = None
    return phase


def _read_later(tensors: Tensors, number: int, part: Part, storage: Storage) -> Any:
    return lambda: sidecar.decode(tensors.of(number), part, storage)
