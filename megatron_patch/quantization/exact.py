"""The elements of a tensor that are sent uncompressed: vectors, such as norms' weights and biases.

They are some thousandths of a model's elements, of sizes unlike those of the matrices beside them. Their
numbers lie behind the scales of a payload, in fp32. The owner sums them in fp64, divides where Megatron
asked for the average, and rounds once. No error is kept of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_patch.quantization.blocks import Range, Span, in_order, within
from megatron_patch.quantization.packing import over

NONE_HERE = -1
"""Fills the row of a shard that has fewer of these elements than others."""


_Key = tuple[torch.device, int, int]
"""Device; byte of a payload from which on they lie; words of a payload (0: the shards' differ)."""


@dataclass(frozen=True, eq=False)
class ExactElements:
    """The positions of these elements in each of N shards of S elements."""

    parts: tuple[tuple[Range, ...], ...]
    """The places of each shard's elements."""
    shard_size: int
    _copies: dict[_Key, Sequence[torch.Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(spans: Sequence[Span], shards: Sequence[Sequence[Range]], shard_size: int) -> ExactElements | None:
        """The elements of the spans marked `exact`, in shards given as ranges of a tensor; None if there are
        none."""
        exact = in_order(span for span in spans if span.exact)
        parts = tuple(
            tuple((place, place + last - first) for _, first, last, place in within(exact, ranges))
            for ranges in shards
        )
        return ExactElements(parts, shard_size) if any(parts) else None

    def shards(self, first: int, count: int, step: int) -> ExactElements | None:
        """The elements of `count` shards from `first` on, every `step`-th; None if there are none."""
        parts = self.parts[first::step][:count]
        return ExactElements(parts, self.shard_size) if any(parts) else None

    @property
    def nbytes(self) -> list[int]:
        """Bytes that these elements take in each shard's payload."""
        return [4 * sum(high - low for low, high in parts) for parts in self.parts]

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """int64 [N, n], on CPU: which elements of its shard, NONE_HERE behind a shard's last."""
        found = torch.full((len(self.parts), max(self.nbytes) // 4), NONE_HERE, device="cpu")
        for row, parts in zip(found, self.parts, strict=True):
            at = 0
            for low, high in parts:
                row[at : at + high - low] = torch.arange(low, high, device="cpu")
                at += high - low
        return found

    def _kept(self, key: _Key, made: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """The result of `made` on the key's device, computed and copied there once."""
        if key not in self._copies:
            self._copies[key] = [part.to(key[0]) for part in made()]
        return self._copies[key]

    def _slots(self, firsts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(which elements of the tensor, which words they are sent in), where each shard's begin with the
        words `firsts` [N]; int64."""
        there = self.places != NONE_HERE
        shard = torch.arange(len(self.places), device="cpu")[:, None]
        slots = firsts[:, None] + torch.arange(self.places.shape[1], device="cpu")
        return (self.places + shard * self.shard_size)[there], slots[there]

    def write(self, tensor: torch.Tensor, payload: torch.Tensor, start: int, starts: torch.Tensor) -> None:
        """Write these elements of `tensor`, [B] of any float dtype, into the payloads of all shards, and
        zeros after them.

        The payloads begin at the bytes `starts` [N + 1] of `payload`, uint8; elements from byte `start` of
        each on, a multiple of 4.
        """

        def made() -> Sequence[torch.Tensor]:
            firsts = (starts[:-1] + start) // 4
            ends = firsts + (self.places != NONE_HERE).sum(1)
            behind = torch.stack([ends, starts[1:] // 4], dim=1).tolist()
            fill = [torch.arange(*part, device="cpu") for part in behind]
            return *self._slots(firsts), torch.cat(fill)

        words = payload.view(-1).view(torch.float32)
        elements, slots, fill = self._kept((tensor.device, start, 0), made)
        words.index_copy_(0, slots, tensor.index_select(0, elements).to(torch.float32))
        if len(fill):
            words.index_fill_(0, fill, 0)

    def read(self, payloads: torch.Tensor, start: int, output: torch.Tensor, divisor: int = 1) -> None:
        """Sum the senders' payloads, uint8 [senders, N, payload_bytes], into `output`, [B] of any float
        dtype."""
        words = payloads.view(torch.float32)
        _, rows, row = words.shape
        elements, slots = self._kept(
            (output.device, start, row),
            lambda: self._slots(torch.arange(rows, device="cpu") * row + start // 4),
        )
        values = words.reshape(len(words), -1).index_select(1, slots)
        total = over(values.sum(dim=0, dtype=torch.float64), divisor)
        output.index_copy_(0, elements, total.to(torch.float32).to(output.dtype))
