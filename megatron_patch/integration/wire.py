"""Bytes that one rank sends to other ranks for one Megatron bucket group, without compression.

Ideal counts, as a ring or an all-to-all moves them: a reduce-scatter or an all-gather over N ranks sends
(N-1)/N of the bucket from every rank, an all-reduce twice that. (gloo's own reduce-scatter moves twice the
ideal; NCCL's does not.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Wire:
    """Bytes that this rank sent to other ranks, and the elements they stood for."""

    nbytes: float = 0.0
    elements: float = 0.0

    def add(self, other: Wire) -> None:
        self.nbytes += other.nbytes
        self.elements += other.elements

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for every element sent."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def _sharded(bucket_group: Any, name: str) -> Wire:
    ranks = bucket_group.intra_distributed_optimizer_instance_size
    total = Wire()
    for bucket in bucket_group.buckets:
        buffer = getattr(bucket, name)
        if buffer is not None:
            elements = buffer.numel() * (ranks - 1) / ranks
            total.add(Wire(elements * buffer.element_size(), elements))
    return total


def stock_gradients(bucket_group: Any, all_reduce: bool = False) -> Wire:
    """Megatron's own gradient exchange of a distributed optimizer's bucket group, once."""
    wire = _sharded(bucket_group, "grad_data")
    return Wire(2 * wire.nbytes, 2 * wire.elements) if all_reduce else wire


def weights(bucket_group: Any) -> Wire:
    """The all-gather of a bucket group's updated parameters, once a step."""
    return _sharded(bucket_group, "param_data")
