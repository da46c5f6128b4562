"""The layout of one rank's error states: which elements of the model they belong to, and how they are stored.

A checkpoint's manifest has it as plain values (`RankLayout`). `RankState` has the senders, in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch.collectives.sender import MovingAverageError, Sender
from megatron_patch.quantization.blocks import BlockTable, Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.session.resharding import Part, Piece, Position
from megatron_patch.session.session import Session

FORMAT = 1
"""The format number of manifests."""


class Damaged(Exception):
    """Saved error states are missing, truncated, changed or not this checkpoint's; the text says which."""


@dataclass(frozen=True)
class Storage:
    """How an error state is stored: its blocks, and its dtype ("int8", "bf16", "fp32"; None: no error).

    `blocks` is the number of scales of a shard if blocks follow the parameters (Part.spans), or None if they
    are counted from each shard's beginning. `rotated` says whether it is the error of rotated blocks.
    """

    shards: int
    shard_size: int
    block: int
    dtype: str | None
    blocks: int | None = None
    rotated: bool = False


@dataclass(frozen=True)
class RankLayout:
    """What a rank's error states belong to, and how each is stored.

    Data-parallel peers have equal layouts, but for the positions.
    """

    states: tuple[tuple[Part, Storage], ...]

    def without_positions(self) -> RankLayout:
        """Return the layout with all positions set to 0, which data-parallel peers have in common."""
        nowhere = Position(0, 0)
        return RankLayout(
            tuple((dataclasses.replace(p, position=nowhere, index=0), storage) for p, storage in self.states)
        )

    @property
    def positions(self) -> list[list[int]]:
        """For every state the fields of its Part's `position`, and its `index`."""
        return [[*dataclasses.astuple(part.position), part.index] for part, _ in self.states]

    def at(self, positions: list[list[int]]) -> RankLayout:
        """Return this layout with the given positions."""
        return RankLayout(
            tuple(
                (dataclasses.replace(part, position=Position(*position), index=index), storage)
                for (part, storage), (*position, index) in zip(self.states, positions, strict=True)
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values without positions; a bucket that several states belong to is listed once."""
        buckets = list(dict.fromkeys(_bucket(part) for part, _ in self.states))
        return {
            "buckets": [
                {
                    "numel": numel,
                    "pieces": [dataclasses.asdict(piece) for piece in pieces],
                    "spans": [dataclasses.astuple(span) for span in spans],
                }
                for pieces, numel, spans in buckets
            ],
            "states": [
                {
                    "kind": part.kind,
                    "bucket": buckets.index(_bucket(part)),
                    "senders": part.senders,
                    "weight": part.weight,
                    **dataclasses.asdict(storage),
                }
                for part, storage in self.states
            ],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RankLayout:
        """Invert `as_json`; all positions are 0."""
        pieces = [tuple(Piece(**_tuples(p)) for p in bucket["pieces"]) for bucket in content["buckets"]]
        numels = [bucket["numel"] for bucket in content["buckets"]]
        spans = [tuple(Span(*span) for span in bucket.get("spans", ())) for bucket in content["buckets"]]
        states = []
        for state in content["states"]:
            kind, bucket, senders, weight = (state.pop(n) for n in ("kind", "bucket", "senders", "weight"))
            part = Part(
                kind, pieces[bucket], numels[bucket], Position(0, 0), 0, senders, weight, spans[bucket]
            )
            states.append((part, Storage(**state)))
        return RankLayout(tuple(states))


def _bucket(part: Part) -> tuple[tuple[Piece, ...], int, tuple[Span, ...]]:
    return part.pieces, part.bucket_numel, part.spans


def _tuples(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in piece.items()}


def decode(tensors: dict[str, torch.Tensor], part: Part, storage: Storage) -> torch.Tensor:
    """Decode a stored error state to fp32 [part.position.numel] on CPU."""
    assert storage.dtype is not None
    numel, size, block = part.position.numel, storage.shard_size, storage.block
    layout = BlockLayout.by_shards(numel, storage.shards, size, 8, block)
    if storage.blocks is not None:
        shards = [
            part.position.ranges(shard * size, min((shard + 1) * size, numel))
            for shard in range(storage.shards)
        ]
        layout = dataclasses.replace(
            layout, table=BlockTable.of(part.spans, shards, block, 8, storage.blocks)
        )
    error = MovingAverageError(layout, 0.0, storage.dtype, torch.device("cpu"), storage.rotated)
    error.restore(tensors)
    return error.flat()


class RankState:
    """The senders of an attached model on this rank, with the layout of their error states.

    Args:
        found: the senders in order, each with the Part that its error state belongs to.
        sessions: the sessions of the model's parts, at least one.
        groups: the sizes of the process groups that the model is spread over, by name.
        forget: clears what else the model keeps of earlier steps.
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
        """Yield all tensors to be saved, with their names."""
        if self.config.save_error:
            for number, sender in enumerate(self.senders):
                for name, tensor in sender.state().items():
                    yield f"{number}.{name}", tensor

    def start_from_zero(self, steps: int) -> None:
        """Restart every session after `steps` optimizer steps, with errors of zero."""
        for state in self.states:
            state.restart(steps)
        self._forget()


def _storage(sender: Sender) -> Storage:
    layout = sender.layout
    dtype = None if sender.error is None else sender.error.dtype
    blocks = None if layout.by_shard else layout.blocks
    rotated = sender.codec.rotation.rotated
    return Storage(layout.shards, layout.shard_size, layout.block, dtype, blocks, rotated)
