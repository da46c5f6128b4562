"""Bytes that one rank sends to other ranks for one Megatron bucket group, without compression.

Ideal counts, as a ring or an all-to-all moves them: a reduce-scatter or an all-gather over N ranks sends
(N-1)/N of the bucket from every rank, an all-reduce twice that. (gloo's own reduce-scatter moves twice the
ideal; NCCL's does not.)
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.collectives.traffic import Traffic


def _exchange(buffer: torch.Tensor | None, ranks: int, times: int = 1) -> Traffic:
    if buffer is None:
        return Traffic()
    elements = times * buffer.numel() * (ranks - 1) / ranks
    return Traffic(elements * buffer.element_size(), elements)


def stock_gradients(bucket_group: Any, force_all_reduce: bool = False) -> Traffic:
    """Megatron's own gradient exchange of a bucket group, once."""
    config = bucket_group.ddp_config
    total = Traffic()
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


def weights(bucket_group: Any) -> Traffic:
    """The all-gather of a bucket group's updated parameters, once a step; none if they are replicated."""
    total = Traffic()
    if bucket_group.ddp_config.use_distributed_optimizer:
        for bucket in bucket_group.buckets:
            total.add(bucket_weights(bucket_group, bucket))
    return total


def bucket_weights(bucket_group: Any, bucket: Any) -> Traffic:
    """The all-gather of one of its buckets."""
    return _exchange(bucket.param_data, bucket_group.intra_distributed_optimizer_instance_size)
