"""Restores saved error states: exactly in the same layout, else by resharding.

Every rank decides without a collective, since some training loops load on some ranks only. If a rank's layout
is that of a saved rank, this is also true of its peers, whose states belong to the same elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.collectives.sender import MovingAverageError
from megatron_patch.config import CompressionConfig
from megatron_patch.session.events import Events
from megatron_patch.session.layouts import Damaged, RankLayout, RankState, Storage, decode
from megatron_patch.session.onset import Onset, Phase
from megatron_patch.session.resharding import Part, SavedState, reshard


class Tensors(Protocol):
    """The tensors of a saved rank."""

    def of(self, state: int) -> dict[str, torch.Tensor]:
        """Return the tensors of state number `state`."""


class Reader:
    """Restores one rank's state from a saved one. A subclass reads the tensors, in `tensors_of`.

    Args:
        rank: the state of this rank.
        content: what packed.content_of has returned.
        layouts: the layouts of all saved ranks, or of this rank alone if its layout has not changed.
        stored: the saved ranks that have tensors.
        problem: what is known to be damaged. Counters are restored even so: they belong to the whole job, and
            ranks must agree on what they exchange.
    """

    def __init__(
        self,
        rank: RankState,
        content: Mapping[str, Any],
        layouts: Mapping[int, RankLayout],
        stored: Set[int],
        problem: Damaged | None = None,
    ) -> None:
        self.rank, self._problem = rank, problem
        self._content, self._layouts, self._stored = content, layouts, stored
        same = [saved for saved, layout in layouts.items() if layout == rank.layout]
        here = dist.get_rank()
        self._mine = here if here in same else next(iter(same), None)

    @property
    def mine(self) -> int | None:
        """The saved rank whose state has the same elements and is restored exactly; None if there is none."""
        return self._mine if self._content["world_size"] == dist.get_world_size() else None

    def tensors_of(self, saved_rank: int) -> Tensors:
        """Return the tensors of a saved rank, which must be in `stored`."""
        raise NotImplementedError

    def overlapping(self) -> list[int]:
        """Return the saved ranks whose tensors hold elements of this rank's parameters."""
        return [
            saved
            for saved, layout in self._layouts.items()
            if saved in self._stored and any(self._shares(part, storage) for part, storage in layout.states)
        ]

    def _shares(self, part: Part, storage: Storage) -> bool:
        return storage.dtype is not None and not self._keys.isdisjoint(piece.key for piece in part.pieces)

    @functools.cached_property
    def _keys(self) -> set[str]:
        return {piece.key for part, _ in self.rank.layout.states for piece in part.pieces}

    def apply(self, loss_scale: float) -> str:
        """Restore the state as far as possible; returns a line that says what happened on this rank.

        Raises:
            Damaged: the saved state is damaged; counters were restored before errors were read.
        """
        try:
            return self._applied(loss_scale)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Damaged(f"it holds what this release does not know: {error!r}") from error

    def _applied(self, loss_scale: float) -> str:
        manifest, rank = self._content, self.rank
        rank.start_from_zero(manifest["steps"])
        for state in rank.states:
            state.ledger.steps_seen = manifest["steps_seen"]
            state.ledger.events = Events(**manifest["events"])
            state.ledger.onset = Onset.of_manifest(manifest, state.config)
        saved = manifest["config"]
        # Errors are rescaled so that e / (1 - beta), the gradient that is still to be sent, is unchanged.
        beta = saved.get("error_beta", rank.config.beta)
        factor = loss_scale / manifest["loss_scale"] * (1 - rank.config.beta) / (1 - beta)
        if saved["method"] != rank.config.method:
            return f"errors start from zero: the checkpoint is of method {saved['method']}"
        for state in rank.states:
            state.ledger.phase = _resumed(Phase(**manifest.get("phase", {})), state.config)
        if manifest["mid_step"]:
            for state in rank.states:
                state.ledger.events.replays += 1
            return "errors start from zero: the checkpoint is from within a step, which runs again"
        if self._problem is not None:
            raise self._problem
        if self.mine is not None:
            self._apply_exactly(self.mine, factor)
        if not rank.config.keeps_errors:
            return "step counters restored; this method keeps no errors"
        if not saved["save_error"]:
            return "errors start from zero: they were not saved (compression.save_error: false)"
        if self.mine is not None:
            return "error states restored exactly"
        return self._reshard(factor)

    def _apply_exactly(self, mine: int, factor: float) -> None:
        if mine not in self._stored:
            return
        tensors = self.tensors_of(mine)
        for number, sender in enumerate(self.rank.senders):
            found = tensors.of(number)
            if sender.error is not None and found:
                self._put_back(number, sender.error, found)
                if factor != 1.0:
                    sender.error.scale_by(factor)

    @staticmethod
    def _put_back(number: int, error: MovingAverageError, found: dict[str, torch.Tensor]) -> None:
        try:
            error.restore(found)
        except ValueError as problem:
            raise Damaged(f"state {number}: {problem}") from problem

    def _reshard(self, factor: float) -> str:
        new = [part for part, _ in self.rank.layout.states]
        lost = total = 0
        for sender, (values, missing) in zip(
            self.rank.senders, _or_damaged(reshard(new, self._saved_states())), strict=True
        ):
            assert sender.error is not None
            sender.error.set(values * factor)
            lost += missing
            total += values.numel()
        if self._same_senders(new):
            how = "every sender keeps its own"
        else:
            how = "where their number changed, senders start from the mean of the old ones"
        rest = f"; {lost:,} of this rank's {total:,} elements start from zero" if lost else ""
        groups = self.rank.groups
        old = self._content["groups"]
        changed = [f"{name} {old[name]} -> {n}" for name, n in groups.items() if old.get(name, n) != n]
        why = f" ({', '.join(changed)})" if changed else ""
        return f"error states carried over to another layout{why}: {how}{rest}"

    def _same_senders(self, new: Sequence[Part]) -> bool:
        """Whether every element of this rank has as many senders as before."""
        old = {
            (piece.key, part.kind, part.senders)
            for layout in self._layouts.values()
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


def _or_damaged(states: Iterator[tuple[torch.Tensor, int]]) -> Iterator[tuple[torch.Tensor, int]]:
    try:
        yield from states
    except (RuntimeError, ValueError) as problem:  # Torch raises them for a wrong shape, or lack of memory.
        raise Damaged(f"no error states as a save writes them: {str(problem).splitlines()[0]}") from problem


def _resumed(phase: Phase, config: CompressionConfig) -> Phase:
    """Return the saved phase; a warm-up that is not over ends when the options of this run say.

    Checkpoints of releases before 0.3 have the planned step as `switch_step`.
    """
    if phase.variance_steps is None and config.warmup_steps is not None:
        phase.switch_step = None
    return phase


def _read_later(tensors: Tensors, number: int, part: Part, storage: Storage) -> Any:
    return lambda: decode(tensors.of(number), part, storage)
