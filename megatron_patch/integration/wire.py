"""Bytes that one rank sends to other ranks for one Megatron bucket group, without compression.

Ideal counts, as a ring or an all-to-all moves them: a reduce-scatter or an all-gather over N ranks sends
(N-1)/N of the bucket from every rank, an all-reduce twice that. (gloo's own reduce-scatter moves twice the
ideal; NCCL's does not.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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


def _exchange(buffer: torch.Tensor | None, ranks: int, times: int = 1) -> Wire:
    if buffer is None:
        return Wire()
    elements = times * buffer.numel() * (ranks - 1) / ranks
    return Wire(elements * buffer.element_size(), elements)


def stock_gradients(bucket_group: Any, force_all_reduce: bool = False) -> Wire:
    """Megatron's own gradient exchange of a bucket group, once."""
    config = bucket_group.ddp_config
    total = Wire()
    for bucket in bucket_group.buckets:
        if not config.use_distributed_optimizer:
            total.add(_exchange(bucket.grad_data, bucket_group.data_parallel_group.size(), times=2))
            continue
        ranks = bucket_group.intra_distributed_optimizer_instance_size
        total.add(_exchange(bucket.grad_data, ranks, times=2 if force_all_reduce else 1))
        if config.num_distributed_optimizer_instances > 1:
            instances = bucket_group.inter_distributed_optimizer_instance_group.size()
            total.add(_exchange(bucket.grad_data[: bucket.grad_data.numel() // ranks], instances, times=2))
    return total


def weights(bucket_group: Any) -> Wire:
    """The all-gather of a bucket group's updated parameters, once a step; none if they are replicated."""
    total = Wire()
    if bucket_group.ddp_config.use_distributed_optimizer:
        for bucket in bucket_group.buckets:
            total.add(_exchange(bucket.param_data, bucket_group.intra_distributed_optimizer_instance_size))
    return total
