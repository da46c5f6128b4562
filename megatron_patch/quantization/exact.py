"""The elements of a tensor that are sent as they are: vectors, such as norms' weights and biases.

They are some thousandths of a model's elements, of sizes unlike those of the matrices beside them. Their
numbers lie behind the scales of a payload, in fp32. The owner sums them in fp64, divides where Megatron
asked for the average, and rounds once. No error is kept of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_patch.quantization.blocks import Range, Span, ranges_within
from megatron_patch.quantization.scales import over

NONE_HERE = -1
"""Stands for an element where a shard has less of them than others."""


@dataclass(frozen=True, eq=False)
class ExactElements:
    """Where they are in each of N shards of S elements."""

    places: torch.Tensor
    """int64 [N, n], on CPU: which elements of its shard, NONE_HERE behind a shard's last."""
    shard_size: int
    _copies: dict[tuple[torch.device, int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

    @staticmethod
    def of(spans: Sequence[Span], shards: Sequence[Sequence[Range]], shard_size: int) -> ExactElements | None:
        """Those of the spans that are `exact`, in shards that are some ranges of a tensor; None: there are
        none."""
        exact = [(span.start, span.start + span.length) for span in spans if span.exact]
        found = [
            torch.cat([torch.arange(0), *(torch.arange(*part) for part in ranges_within(exact, ranges))])
            for ranges in shards
        ]
        most = max(map(len, found))
        if most == 0:
            return None
        places = torch.full((len(found), most), NONE_HERE)
        for row, here in zip(places, found, strict=True):
            row[: len(here)] = here
        return ExactElements(places, shard_size)

    def shards(self, first: int, count: int, step: int) -> ExactElements | None:
        """Those of `count` of the shards, each `step`-th; None: there are none."""
        places = self.places[first::step][:count]
        most = int((places != NONE_HERE).sum(dim=1).max())
        return ExactElements(places[:, :most], self.shard_size) if most else None

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each shard's payload that they take."""
        counts: list[int] = (self.places != NONE_HERE).sum(dim=1).tolist()
        return [4 * count for count in counts]

    def _on(self, device: torch.device, start: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(which elements of the tensor, which fp32 words of N payloads of so many words, from byte `start`
        on), int64 on a device; copied there once."""
        key = device, start, words
        if key not in self._copies:
            there = self.places != NONE_HERE
            shard = torch.arange(len(self.places))[:, None]
            slot = torch.arange(self.places.shape[1]) + start // 4
            elements, slots = (self.places + shard * self.shard_size)[there], (shard * words + slot)[there]
            self._copies[key] = elements.to(device), slots.to(device)
        return self._copies[key]

    def write(self, tensor: torch.Tensor, payload: torch.Tensor, start: int) -> None:
        """Write those of `tensor`, [B] of any float dtype, into `payload`, contiguous uint8 [N,
        payload_bytes], from byte `start` on, a multiple of 4, and zeros where there are none."""
        words = payload.view(torch.float32)
        elements, slots = self._on(tensor.device, start, words.shape[1])
        words[:, start // 4 :] = 0
        words.view(-1).index_copy_(0, slots, tensor.index_select(0, elements).to(torch.float32))

    def read(self, payloads: torch.Tensor, start: int, output: torch.Tensor, divisor: int = 1) -> None:
        """Sum the senders' payloads, uint8 [senders, N, payload_bytes], into `output`, [B] of any float
        dtype."""
        words = payloads.view(torch.float32)
        elements, slots = self._on(output.device, start, words.shape[2])
        values = words.reshape(len(words), -1).index_select(1, slots)
        total = over(values.sum(dim=0, dtype=torch.float64), divisor)
        output.index_copy_(0, elements, total.to(torch.float32).to(output.dtype))
