"""Traffic: bytes that one rank sends to others.

Without compression they are ideal counts, as a ring or an all-to-all moves them. (gloo's own reduce-scatter
moves twice the ideal; NCCL's does not.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Bytes that one rank sends to other ranks, and the elements that they stand for."""

    nbytes: float = 0.0
    elements: float = 0.0

    def add(self, other: Traffic) -> None:
        self.nbytes += other.nbytes
        self.elements += other.elements

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nbytes + other.nbytes, self.elements + other.elements)

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for every element sent."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def reduce_scattered(tensor: torch.Tensor, ranks: int) -> Traffic:
    """An uncompressed reduce-scatter of a tensor, whole, over `ranks` ranks; an all-gather to it, too."""
    elements = tensor.numel() * (ranks - 1) / ranks
    return Traffic(elements * tensor.element_size(), elements)


def all_reduced(tensor: torch.Tensor, ranks: int) -> Traffic:
    """An uncompressed all-reduce of a tensor over `ranks` ranks."""
    half = reduce_scattered(tensor, ranks)
    return half + half
