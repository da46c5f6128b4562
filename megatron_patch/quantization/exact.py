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
    _copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

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

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(which elements of the tensor, which of [N * n]), int64 on a device; copied there once."""
        if device not in self._copies:
            shard = torch.arange(len(self.places))[:, None] * self.shard_size
            there = self.places != NONE_HERE
            elements, slots = (self.places + shard)[there], there.view(-1).nonzero()[:, 0]
            self._copies[device] = elements.to(device), slots.to(device)
        return self._copies[device]

    def write(self, tensor: torch.Tensor, payload: torch.Tensor, start: int) -> None:
        """Write those of `tensor`, [B] of any float dtype, into `payload`, uint8 [N, payload_bytes], from
        byte `start` on, and zeros behind them."""
        elements, slots = self._on(tensor.device)
        values = torch.zeros(self.places.numel(), dtype=torch.float32, device=tensor.device)
        values[slots] = tensor[elements].to(torch.float32)
        end = start + self._most
        payload[:, start:end] = values.view(len(payload), -1).view(torch.uint8)
        payload[:, end:] = 0

    def read(self, payloads: torch.Tensor, start: int, output: torch.Tensor, divisor: int = 1) -> None:
        """Sum the senders' payloads, uint8 [senders, N, payload_bytes], into `output`, [B] of any float
        dtype."""
        elements, slots = self._on(output.device)
        values = payloads[..., start : start + self._most].contiguous().view(torch.float32)
        total = over(values.to(torch.float64).sum(dim=0).view(-1)[slots], divisor)
        output[elements] = total.to(torch.float32).to(output.dtype)

    @property
    def _most(self) -> int:
        """Bytes of them in the payload which has most."""
        return 4 * self.places.shape[1]
