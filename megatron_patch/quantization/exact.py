"""The elements of a tensor that are sent uncompressed: vectors, such as norms' weights and biases.

They are some thousandths of a model's elements, and their magnitudes differ from those of the matrices beside
them. A payload has them in fp32 after its scales. The owner sums them in fp64, divides by N for the average,
and rounds once. They have no error state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_patch.quantization.blocks import Range, Span, in_order, within
from megatron_patch.quantization.packing import over

NONE_HERE = -1
"""The entry of `places` after the last element of a shard that has fewer exact elements than another."""


_Key = tuple[torch.device, int, int]
"""The device, the byte of a payload where exact elements begin, and the words of a payload (0: it varies)."""


@dataclass(frozen=True, eq=False)
class ExactElements:
    """The positions of the exact elements in each of N shards of S elements."""

    parts: tuple[tuple[Range, ...], ...]
    """For each shard the ranges of its exact elements, counted from the shard's beginning."""
    shard_size: int
    _copies: dict[_Key, Sequence[torch.Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(spans: Sequence[Span], shards: Sequence[Sequence[Range]], shard_size: int) -> ExactElements | None:
        """Find the elements of spans marked `exact`; each shard is a list of ranges of the tensor.

        Returns None if there are none.
        """
        exact = in_order(span for span in spans if span.exact)
        parts = tuple(
            tuple((place, place + last - first) for _, first, last, place in within(exact, ranges))
            for ranges in shards
        )
        return ExactElements(parts, shard_size) if any(parts) else None

    def shards(self, first: int, count: int, step: int) -> ExactElements | None:
        """Select `count` shards, from `first` on and `step` apart; returns None if they have no elements."""
        parts = self.parts[first::step][:count]
        return ExactElements(parts, self.shard_size) if any(parts) else None

    @property
    def nbytes(self) -> list[int]:
        """The bytes of the exact elements in each shard's payload."""
        return [4 * sum(high - low for low, high in parts) for parts in self.parts]

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """The indices in its shard of each shard's exact elements, int64 [N, n] on CPU; then NONE_HERE."""
        indices = torch.full((len(self.parts), max(self.nbytes) // 4), NONE_HERE, device="cpu")
        for row, parts in zip(indices, self.parts, strict=True):
            at = 0
            for low, high in parts:
                row[at : at + high - low] = torch.arange(low, high, device="cpu")
                at += high - low
        return indices

    def _kept(self, key: _Key, compute: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Return the result of `compute` on the key's device; it is computed and copied there only once."""
        if key not in self._copies:
            self._copies[key] = [part.to(key[0]) for part in compute()]
        return self._copies[key]

    def _slots(self, firsts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices in the tensor, words of the payload), int64, of all exact elements.

        `firsts` [N] is the word where each shard's exact elements begin.
        """
        there = self.places != NONE_HERE
        shard = torch.arange(len(self.places), device="cpu")[:, None]
        slots = firsts[:, None] + torch.arange(self.places.shape[1], device="cpu")
        return (self.places + shard * self.shard_size)[there], slots[there]

    def write(self, tensor: torch.Tensor, payload: torch.Tensor, start: int, starts: torch.Tensor) -> None:
        """Write the exact elements of `tensor`, [B] of any float dtype, and zeros after them.

        Shard j's payload is bytes starts[j] to starts[j + 1] of `payload`, uint8; its exact elements begin
        `start` bytes after its beginning, a multiple of 4.
        """

        def compute() -> Sequence[torch.Tensor]:
            firsts = (starts[:-1] + start) // 4
            ends = firsts + (self.places != NONE_HERE).sum(1)
            behind = torch.stack([ends, starts[1:] // 4], dim=1).tolist()
            fill = [torch.arange(*part, device="cpu") for part in behind]
            return *self._slots(firsts), torch.cat(fill)

        words = payload.view(-1).view(torch.float32)
        elements, slots, fill = self._kept((tensor.device, start, 0), compute)
        words.index_copy_(0, slots, tensor.index_select(0, elements).to(torch.float32))
        if len(fill):
            words.index_fill_(0, fill, 0)

    def read(self, payloads: torch.Tensor, start: int, output: torch.Tensor, divisor: int = 1) -> None:
        """Write the sum over senders, divided by `divisor`, to the exact elements of `output`.

        `payloads` is uint8 [senders, N, payload_bytes], `output` [B] of any float dtype.
        """
        words = payloads.view(torch.float32)
        _, rows, row = words.shape
        elements, slots = self._kept(
            (output.device, start, row),
            lambda: self._slots(torch.arange(rows, device="cpu") * row + start // 4),
        )
        values = words.reshape(len(words), -1).index_select(1, slots)
        total = over(values.sum(dim=0, dtype=torch.float64), divisor)
        output.index_copy_(0, elements, total.to(torch.float32).to(output.dtype))
