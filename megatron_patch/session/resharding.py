"""Error states after a change of layout: what the old senders remember, in the hands of the new ones.

An error belongs to an element of the model's gradient, wherever that element lies: the bucket, the
tensor-parallel part, the pipeline stage. A state that is saved says which elements it holds (Part, Piece);
a state that is new looks for its own elements among them:

    as many senders as before     sender n takes what sender n held
    another number of senders     every new sender starts from the mean of what the old ones held

so that the pending correction of each element of the reduced gradient, sum_n w_n*e_n, is unchanged, where w_n
is the weight of what sender n sends (1 where Megatron asks for the sum, 1/N for the average).
Elements that no rank held start from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_patch.collectives.exchange import ALL_REDUCE, NODE_SUM, OWNER, REDUCE_SCATTER, Position
from megatron_patch.quantization.blocks import Span


@dataclass(frozen=True)
class Piece:
    """A box of one of the model's tensors, and where its elements lie in a bucket.

    `key`, `offset` and `shape` are Megatron's ShardedTensor's: the whole tensor's name, where the box begins
    in it and how large it is. Element (i, j, ...) of the box is the bucket's element `start` + i*strides[0] +
    j*strides[1] + ...
    """

    name: str
    """The parameter's name in its model chunk, for the reader of a manifest."""
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """The piece as a view of a bucket, [B] -> `shape`."""
        return bucket.as_strided(self.shape, self.strides, bucket.storage_offset() + self.start)


@dataclass(frozen=True)
class Part:
    """What one error state is of: some elements of a bucket, as one of several who send them.

    `kind` is REDUCE_SCATTER or ALL_REDUCE for a sender, NODE_SUM for one that sends what its node has summed,
    OWNER for the owner of an all-reduced shard. Every
    element has `senders` of that kind, of which this is number `index`; the exchange gives each of them
    `weight` in the reduced gradient.
    """

    kind: str
    pieces: tuple[Piece, ...]
    bucket_numel: int
    position: Position
    index: int
    senders: int
    weight: float
    spans: tuple[Span, ...] = ()
    """The bucket's parameters, where the error's blocks follow them."""

    @property
    def share(self) -> float:
        """What the exchange makes of errors of 1 in all senders."""
        return self.senders * self.weight

    def in_bucket(self, values: torch.Tensor) -> torch.Tensor:
        """[numel] -> [bucket_numel], zero elsewhere."""
        bucket = values.new_zeros(self.bucket_numel)
        self.of(bucket).copy_(values.view(self.position.rows, -1))
        return bucket

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """[bucket_numel] -> [rows, length], a view."""
        return self.position.of(bucket)


SavedState = tuple[Part, Callable[[], torch.Tensor]]
"""A saved error state, and what reads and decodes it, fp32 [position.numel]."""


def reshard(new: Sequence[Part], saved: Iterable[SavedState]) -> Iterator[tuple[torch.Tensor, int]]:
    """For each of a rank's new states its error, fp32 [numel] on CPU, and how many elements no rank held.

    `new` are all states of the rank: what was of a kind that it has no more (another number of optimizer
    instances, say) goes to the first kind that it has.
    """
    saved = list(saved)
    kinds: dict[str, set[str]] = {}
    for part in new:
        for piece in part.pieces:
            kinds.setdefault(piece.key, set()).add(part.kind)
    for part in new:
        yield _reshard_one(part, saved, kinds)


def _reshard_one(
    new: Part, saved: Sequence[SavedState], kinds: dict[str, set[str]]
) -> tuple[torch.Tensor, int]:
    total = torch.zeros(new.bucket_numel, dtype=torch.float32, device="cpu")
    found = torch.zeros_like(total, dtype=torch.bool)
    for kind in dict.fromkeys(old.kind for old, _ in saved):
        of_kind = [(old, read) for old, read in saved if old.kind == kind]
        sums, holders = torch.zeros_like(total), torch.zeros_like(total)
        for old, read in of_kind:
            if kind == new.kind and old.senders == new.senders and old.index != new.index:
                continue  # another sender's own
            pairs = list(_overlaps(new, old, kinds))
            if not pairs:
                continue
            values = old.in_bucket(read() * (old.share / new.share))
            held = old.in_bucket(torch.ones_like(values[: old.position.numel]))
            for (piece, here), (other, there) in pairs:
                piece.of(sums)[here] += other.of(values)[there]
                piece.of(holders)[here] += other.of(held)[there]
        total += sums / holders.clamp(min=1)
        found |= holders > 0
    wanted = torch.zeros_like(found)
    for piece in new.pieces:
        piece.of(wanted).fill_(True)
    return new.of(total).flatten(), int((new.of(wanted) & ~new.of(found)).sum())


_Slices = tuple[slice, ...]


def _overlaps(
    new: Part, old: Part, kinds: dict[str, set[str]]
) -> Iterator[tuple[tuple[Piece, _Slices], tuple[Piece, _Slices]]]:
    """The pieces of `new` and `old` that share elements of a tensor, each with the slices that it shares."""
    by_key: dict[str, list[Piece]] = {}
    for other in old.pieces:
        by_key.setdefault(other.key, []).append(other)
    for piece in new.pieces:
        if new.kind != _heir(old.kind, kinds[piece.key]):
            continue
        for other in by_key.get(piece.key, ()):
            if len(other.shape) != len(piece.shape):
                continue
            low = [max(a, b) for a, b in zip(piece.offset, other.offset, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(piece.offset, piece.shape, other.offset, other.shape, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield (piece, _slices(piece, low, high)), (other, _slices(other, low, high))


def _slices(piece: Piece, low: list[int], high: list[int]) -> _Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.offset, strict=True))


def _heir(kind: str, kinds: set[str]) -> str:
    """The kind of state that takes over what was of `kind`."""
    return next(k for k in (kind, REDUCE_SCATTER, NODE_SUM, ALL_REDUCE, OWNER) if k in kinds)
