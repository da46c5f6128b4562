"""Bytes that a job takes on its fullest GPU, computed as docs/clusters.md says."""

from __future__ import annotations

from megatron_patch.workflows.plan import traffic
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.exchange import IN_FLIGHT, Exchanges
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.plan.methods import Method

_MOMENTS = 8


def bytes_of(job: Job, cluster: Cluster, method: Method) -> float:
    """State, buffers and activations of the fullest stage."""
    return job.activation_bytes + max(
        _state(job, cluster, method, stage) + _buffers(job, cluster, method, stage)
        for stage in range(job.pipeline)
    )


def _state(job: Job, cluster: Cluster, method: Method, stage: int) -> float:
    maker = Exchanges(job, cluster, method, stage)
    total = 0.0
    for expert in (False, True):
        group, elements = job.group(cluster, expert), job.stages[stage].numel(expert)
        owners = group.ranks if maker.distributed else 1
        master = 4 if job.weight_bytes == 2 else 0
        each = job.weight_bytes + maker.gradient_bytes + (_MOMENTS + master) / owners
        if method.exact and maker.distributed and group.ranks > 1:
            each += 4 / group.ranks  # the old shard, and messages of as many bytes at most
        if method.keeps_errors and group.ranks > 1:
            each += traffic.ERROR / (group.local if maker.two_hops(group) else 1)
        if method.momentum:
            each += 4 + traffic.ERROR / group.ranks
        total += elements * each
    return total


def _buffers(job: Job, cluster: Cluster, method: Method, stage: int) -> float:
    if method.bits is None:
        return 0.0
    maker = Exchanges(job, cluster, method, stage)
    total = 0.0
    for expert in (False, True):
        group = job.group(cluster, expert)
        if group.ranks == 1:
            continue
        largest = sorted((bucket.elements for bucket in job.buckets(stage, cluster, expert)), reverse=True)
        hops = maker.two_hops(group)
        for place, elements in enumerate(largest[:IN_FLIGHT]):
            share = elements // group.local if hops else elements
            shards = group.nodes if hops else group.ranks
            total += 2 * shards * traffic.payload(share, shards, method.bits)
            if hops and place == 0:
                total += share * (4 if method.intra_bits else maker.gradient_bytes)
    return total
