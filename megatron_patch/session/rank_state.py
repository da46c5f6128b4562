"""What one rank remembers of a model: its senders, in an order that a checkpoint can name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatron_patch.collectives.sender import Sender
from megatron_patch.session.layouts import RankLayout, Storage
from megatron_patch.session.resharding import Part
from megatron_patch.session.session import Session


class RankState:
    """The senders of an attached model on this rank, and what each is of.

    Args:
        found: the senders in order, each with what its error state is of.
        sessions: those of the model's parts, one at least.
        groups: sizes of the groups of ranks that the model is spread over, by name.
        forget: clears what else the model holds of earlier steps.
    """

    def __init__(
        self,
        found: Sequence[tuple[Sender, Part]],
        sessions: Sequence[Session],
        groups: Mapping[str, int],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        for session in sessions:
            session.memory.bring_back()
        self.senders = [sender for sender, _ in found]
        self.layout = RankLayout(tuple((part, _storage(sender)) for sender, part in found))
        self.states = list(sessions)
        self.config = self.states[0].config
        self.groups = dict(groups)
        self._forget = forget

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is to be saved, by names."""
        if self.config.save_error:
            for number, sender in enumerate(self.senders):
                for name, tensor in sender.state().items():
                    yield f"{number}.{name}", tensor

    def start_from_zero(self, steps: int) -> None:
        """Begin as after `steps` optimizer steps, with errors of zero."""
        for state in self.states:
            state.restart(steps)
        self._forget()


def _storage(sender: Sender) -> Storage:
    layout = sender.layout
    dtype = None if sender.error is None else sender.error.dtype
    blocks = None if layout.by_shard else layout.blocks
    rotated = sender.codec.rotation.rotated
    return Storage(layout.shards, layout.shard_size, layout.block, dtype, blocks, rotated)
