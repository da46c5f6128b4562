"""Computes the bytes of one collective of one bucket: what leaves a node, and what a rank sends inside it.

This follows NCCL's rings and all-to-all. With N ranks on M nodes, R of them on each, and S bytes of a shard:

    ring (reduce-scatter, all-gather)   every rank sends (N-1) S, and one of a node's R sends to the next node
    all-to-all                          every rank sends S to each of the N-R ranks elsewhere, and to R-1 here
    two hops                            a ring, or an all-to-all, inside the node, then one between M nodes

A node's uplink carries `beside` groups at a time. Sizes of low-bit payloads come from quantization/layout.py.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.cluster import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Cluster
from megatron_patch.workflows.plan.job import BETWEEN, INSIDE, Group

_BLOCK = 128
ERROR = 1 + 2 / _BLOCK
"""Bytes per element of an 8-bit error state with a bf16 scale for each block."""


@dataclass(frozen=True)
class Call:
    """One collective, as one rank takes part in it."""

    kind: str
    uplink: float
    """Bytes that leave the node, sent by all of its ranks in the same collective."""
    inside: float
    """Bytes that this rank sends to ranks of its node."""
    sent: float
    """Bytes that this rank sends in all."""
    latency: float
    """Seconds before the first byte arrives."""
    scope: str
    """The group's scope: all, inside or between."""
    calls: int = 1
    """How many collectives this one represents."""

    def between(self, group: Group) -> float:
        """Return the bytes that this rank sends to other nodes."""
        return self.uplink / (group.beside * group.local)


def ring(kind: str, shard: float, group: Group, cluster: Cluster) -> Call:
    """Return a reduce-scatter or all-gather of shards of `shard` bytes, by a ring."""
    n, m, r = group.ranks, group.nodes, group.local
    sent = (n - 1) * shard
    between, inside = m - 1, n - m
    latency = cluster.call_latency + between * cluster.between.latency + inside * cluster.inside.latency
    uplink = sent * group.beside if m > 1 else 0.0
    return Call(kind, uplink, sent * (1 - 1 / r) if m > 1 else sent, sent, latency, group.scope)


def all_to_all(shard: float, group: Group, cluster: Cluster) -> Call:
    """Return an all-to-all in which every rank sends `shard` bytes to each other rank."""
    n, r = group.ranks, group.local
    elsewhere = n - r
    turns = -(-elsewhere // constants.value("peers_at_once"))
    latency = cluster.call_latency + turns * cluster.between.latency
    if r > 1:
        latency += cluster.inside.latency
    uplink = elsewhere * shard * r * group.beside
    return Call(ALL_TO_ALL, uplink, (r - 1) * shard, (n - 1) * shard, latency, group.scope)


def inside_of(group: Group) -> Group:
    """Return the group of a group's ranks on one node."""
    return Group(group.local, 1, group.local, group.beside, INSIDE)


def across(group: Group) -> Group:
    """Return the group of one rank of each of a group's nodes."""
    return Group(group.nodes, group.nodes, 1, group.beside * group.local, BETWEEN)


@functools.cache
def payload(elements: int, shards: int, bits: int, exact: int = 0, whole_blocks: bool = False) -> float:
    """Return the bytes of one shard's payload, with its share of the `exact` elements, sent in fp32."""
    from megatron_patch.quantization.layout import BlockLayout  # imports torch, which --help does not need

    layout = BlockLayout.of(elements, shards, bits, _BLOCK, whole_blocks)
    return layout.payload_bytes + (4 - bits / 8) * exact / shards


def stock_reduce(elements: int, nbytes: int, group: Group, cluster: Cluster, fp32_sum: bool) -> Call:
    """Return Megatron's reduce-scatter of a bucket, which is an all-to-all with fp32 accumulation."""
    shard = elements * nbytes / group.ranks
    if fp32_sum:
        return all_to_all(shard, group, cluster)
    call = ring(REDUCE_SCATTER, shard, group, cluster)
    if not cluster.processor.transport:
        return call
    # gloo's reduce-scatter moves twice the bytes over the links (docs/benchmarks.md).
    return dataclasses.replace(call, uplink=2 * call.uplink, inside=2 * call.inside)


def all_reduce(elements: int, nbytes: int, group: Group, cluster: Cluster) -> tuple[Call, Call]:
    """Return the two halves of an all-reduce: a reduce-scatter and an all-gather, by rings."""
    shard = elements * nbytes / group.ranks
    back = gather(shard, group, cluster)
    # gloo's all-reduce is another ring, of which each half moves as many bytes as an all-gather.
    return back if cluster.processor.transport else ring(REDUCE_SCATTER, shard, group, cluster), back


def gather(shard: float, group: Group, cluster: Cluster) -> Call:
    """Return an all-gather of shards of `shard` bytes."""
    return ring(ALL_GATHER, shard, group, cluster)
