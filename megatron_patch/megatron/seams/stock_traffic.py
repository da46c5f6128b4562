"""Bytes that one rank sends to other ranks for one Megatron bucket group, without compression."""

from __future__ import annotations

from typing import Any

from megatron_patch.collectives.exchange import Traffic, all_reduced, reduce_scattered


def stock_gradients(bucket_group: Any, force_all_reduce: bool = False) -> Traffic:
    """Megatron's own gradient exchange of a bucket group, once."""
    config = bucket_group.ddp_config
    total = Traffic()
    for bucket in bucket_group.buckets:
        if not config.use_distributed_optimizer:
            total.add(all_reduced(bucket.grad_data, bucket_group.data_parallel_group.size()))
            continue
        ranks = bucket_group.intra_distributed_optimizer_instance_size
        total.add((all_reduced if force_all_reduce else reduce_scattered)(bucket.grad_data, ranks))
        if config.num_distributed_optimizer_instances > 1:
            instances = bucket_group.inter_distributed_optimizer_instance_group.size()
            total.add(all_reduced(bucket.grad_data[: bucket.grad_data.numel() // ranks], instances))
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
    if bucket.param_data is None:
        return Traffic()
    return reduce_scattered(bucket.param_data, bucket_group.intra_distributed_optimizer_instance_size)
