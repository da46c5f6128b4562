"""Resharding of error states: after a change of layout the new senders take over the errors of the old ones.

An error belongs to an element of the model's gradient, in whatever bucket, tensor-parallel part or pipeline
stage that element is. A saved state says which elements it holds (Part, Piece), and a new state looks for its
own elements in the saved states:

    as many senders as before     sender n takes the error of the old sender n
    another number of senders     every new sender starts from the mean of the old senders' errors

So sum_n w_n*e_n, what is still to be added to each element of the reduced gradient, is unchanged. w_n is the
weight of sender n: 1 if Megatron asks for the sum, 1/N for the average. Elements that no rank held start from
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_patch.collectives.exchange import ALL_REDUCE, NODE_SUM, OWNER, REDUCE_SCATTER, Position
from megatron_patch.quantization.blocks import Span


@dataclass(frozen=True)
class Piece:
    """A box of one of the model's tensors, and the places of its elements in a bucket.

    `key`, `offset` and `shape` are those of Megatron's ShardedTensor: the whole tensor's name, where the box
    begins in it, and how large it is. Element (i, j, ...) of the box is the bucket's element `start` +
    i*strides[0] + j*strides[1] + ...
    """

    name: str
    """The parameter's name in its model chunk, for people who read a manifest."""
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of `bucket`, [B] -> `shape`."""
        return bucket.as_strided(self.shape, self.strides, bucket.storage_offset() + self.start)


@dataclass(frozen=True)
class Part:
    """The elements of a bucket that one error state belongs to, and which of their senders has it.

    `kind`, `index` and `senders` are those of SenderState. `weight` is the weight of each of these senders in
    the reduced gradient.
    """

    kind: str
    pieces: tuple[Piece, ...]
    bucket_numel: int
    position: Position
    index: int
    senders: int
    weight: float
    spans: tuple[Span, ...] = ()
    """The bucket's parameters, if the error's blocks follow them."""

    @property
    def share(self) -> float:
        """The reduced value of an error of 1 in every sender."""
        return self.senders * self.weight

    def in_bucket(self, values: torch.Tensor) -> torch.Tensor:
        """Put [numel] in its place in [bucket_numel], which is zero elsewhere."""
        bucket = values.new_zeros(self.bucket_numel)
        self.of(bucket).copy_(values.view(self.position.rows, -1))
        return bucket

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return this part as a view of a bucket, [bucket_numel] -> [rows, length]."""
        return self.position.of(bucket)


SavedState = tuple[Part, Callable[[], torch.Tensor]]
"""The Part of a saved error state, and a function that reads and decodes it to fp32 [position.numel]."""


def reshard(new: Sequence[Part], saved: Iterable[SavedState]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield, for each new state, its error, fp32 [numel] on CPU, and how many elements no rank held.

    `new` must be all states of the rank: the errors of a kind that it does not have any more (because of
    another number of optimizer instances, for example) go to the first kind that it has.
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
    known: dict[tuple[tuple[Piece, ...], str], list[_Pair]] = {}
    # Under FSDP2 every rank's part has the pieces of all ranks: they are compared once for all saved ranks.
    for kind in dict.fromkeys(old.kind for old, _ in saved):
        of_kind = [(old, read) for old, read in saved if old.kind == kind]
        sums, holders = torch.zeros_like(total), torch.zeros_like(total)
        for old, read in of_kind:
            if kind == new.kind and old.senders == new.senders and old.index != new.index:
                continue  # This error is another sender's.
            if (old.pieces, kind) not in known:
                known[old.pieces, kind] = list(_overlaps(new, old, kinds))
            pairs = known[old.pieces, kind]
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
_Pair = tuple[tuple["Piece", _Slices], tuple["Piece", _Slices]]


def _overlaps(new: Part, old: Part, kinds: dict[str, set[str]]) -> Iterator[_Pair]:
    """Yield the pairs of pieces of `new` and `old` that share elements, each piece with its shared slices."""
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
    """Return the kind of state, one of `kinds`, that takes over the errors of `kind`."""
    return next(k for k in (kind, REDUCE_SCATTER, NODE_SUM, ALL_REDUCE, OWNER) if k in kinds)
