"""Describes a cluster: its nodes, the links between and inside them, each rank's processor, its collectives.

Links follow the alpha-beta model: a call of a collective takes its latencies, and its bytes divided by the
bandwidth. The ranks of a node share its uplink (`between`); each rank has its own link to the other ranks of
its node (`inside`). Collectives are NCCL's: with N ranks, R of them on each node, and S bytes of a shard,

    ring (reduce-scatter, all-gather)   every rank sends (N-1) S, and one of a node's R sends to the next node
    all-to-all                          every rank sends S to each of the N-R ranks elsewhere, and to R-1 here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_patch.workflows.plan import constants

ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER = COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather")
DEFAULT_GPU, DEFAULT_INTER_GBIT = "H100", 400.0


@dataclass(frozen=True)
class Link:
    """A link: bytes per second in each direction, and seconds for each step of a collective."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Processor:
    """The processor of one rank; each kernel by its seconds for a unit of its work."""

    flops: float
    """Useful operations per second: the peak times its utilisation."""
    compress: Mapping[int, float] = field(default_factory=dict)
    """For each number of bits, seconds per element; the key 0 stands for all other numbers."""
    decompress: float = 0.0
    """Seconds per code (elements times senders)."""
    weight_encode: float = 0.0
    weight_decode: float = 0.0
    weight_sums: float = 0.0
    """Seconds per weight, as for the two above."""
    optimizer: float = 0.0
    """Seconds per parameter that the rank updates."""
    momentum: float = 0.0
    """Additional seconds per parameter with 1-bit Adam."""
    stock_sum: float = 0.0
    """Seconds per element of a bucket of which the owner sums the results of a plain all-to-all."""
    step: float = 0.0
    """The seconds of a step that depend on none of the above."""


@dataclass(frozen=True)
class Group:
    """A group of ranks that exchange a gradient: `local` ranks on each of `nodes` nodes."""

    ranks: int
    nodes: int
    local: int
    beside: float = 1.0
    """How many groups of this kind share a node, and its uplink."""

    @property
    def inside(self) -> Group:
        """The group's ranks on one node."""
        return Group(self.local, 1, self.local, self.beside)

    @property
    def across(self) -> Group:
        """One rank of each of the group's nodes."""
        return Group(self.nodes, self.nodes, 1, self.beside * self.local)


@dataclass(frozen=True)
class Call:
    """One collective of a group, as one rank takes part in it."""

    kind: str
    group: Group
    uplink: float
    """Bytes that leave the node, sent by all of its ranks in the same collective."""
    inside: float
    """Bytes that this rank sends to ranks of its node."""
    sent: float
    """Bytes that this rank sends in all."""
    latency: float
    """Seconds before the first byte arrives."""
    calls: int = 1
    """How many collectives this one represents."""

    @property
    def between(self) -> float:
        """Bytes that this rank sends to other nodes."""
        return self.uplink / (self.group.beside * self.group.local)


@dataclass(frozen=True)
class Cluster:
    """A cluster of `nodes` times `per_node` ranks, and the cost of its collectives."""

    nodes: int
    per_node: int
    between: Link
    inside: Link
    processor: Processor
    call_latency: float = 0.0
    """The seconds that each call of a collective takes."""

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def one_stream(self) -> bool:
        """Whether the rank's own thread runs collectives, and waits for them; NCCL's run beside it."""
        return False

    def needs(self, call: Call) -> dict[str, float]:
        """Return what a call uses: bytes of the node's uplink, and of the rank's link inside its node."""
        return {"uplink": call.uplink, "inside": call.inside}

    def with_inter(self, bytes_per_second: float) -> Cluster:
        """Return this cluster with another bandwidth between nodes."""
        between = dataclasses.replace(self.between, bandwidth=bytes_per_second)
        return dataclasses.replace(self, between=between)

    def all_to_all(self, shard: float, group: Group) -> Call:
        """Return an all-to-all in which every rank sends `shard` bytes to each other rank."""
        elsewhere = group.ranks - group.local
        turns = -(-elsewhere // constants.value("peers_at_once"))
        latency = self.call_latency + turns * self.between.latency
        if group.local > 1:
            latency += self.inside.latency
        uplink = elsewhere * shard * group.local * group.beside
        return Call(ALL_TO_ALL, group, uplink, (group.local - 1) * shard, (group.ranks - 1) * shard, latency)

    def gather(self, shard: float, group: Group, kind: str = ALL_GATHER) -> Call:
        """Return an all-gather, or a reduce-scatter, of shards of `shard` bytes, by a ring."""
        sent, hops = (group.ranks - 1) * shard, group.nodes - 1
        latency = self.call_latency + hops * self.between.latency
        latency += (group.ranks - group.nodes) * self.inside.latency
        inside = sent * (1 - 1 / group.local) if hops else sent
        return Call(kind, group, sent * group.beside if hops else 0.0, inside, sent, latency)

    def stock_reduce(self, elements: int, nbytes: int, group: Group, fp32_sum: bool) -> Call:
        """Return Megatron's reduce-scatter of a bucket, which is an all-to-all with fp32 accumulation."""
        shard = elements * nbytes / group.ranks
        return self.all_to_all(shard, group) if fp32_sum else self.gather(shard, group, REDUCE_SCATTER)

    def all_reduce(self, elements: int, nbytes: int, group: Group) -> tuple[Call, Call]:
        """Return the two halves of an all-reduce: a reduce-scatter and an all-gather, by rings."""
        shard = elements * nbytes / group.ranks
        return self.gather(shard, group, REDUCE_SCATTER), self.gather(shard, group)


def of_gpus(
    gpu: constants.Gpu,
    nodes: int,
    per_node: int,
    inter_gbit: float | None = None,
    intra_gbyte: float | None = None,
    mfu: float | None = None,
) -> Cluster:
    """Return a cluster of GPUs from data sheets and constants; `plan` has options of the same names."""
    numbers = {name: constant.value for name, constant in constants.numbers_of(gpu).items()}
    memory = gpu.memory_gbyte * 1e9 * numbers["memory_share"]
    outside = (DEFAULT_INTER_GBIT if inter_gbit is None else inter_gbit) * 1e9 / 8 * numbers["tcp_headers"]
    inside = numbers["intra_efficiency"] * (gpu.link_gbyte if intra_gbyte is None else intra_gbyte) * 1e9
    return Cluster(
        nodes=nodes,
        per_node=per_node,
        between=Link(outside, numbers["inter_latency"]),
        inside=Link(inside, numbers["intra_latency"]),
        processor=Processor(
            flops=gpu.tflops * 1e12 * (numbers["mfu"] if mfu is None else mfu),
            compress={0: 1 / numbers["compress"]},
            decompress=1 / numbers["decompress"],
            weight_encode=1 / numbers["weight_encode"],
            weight_decode=1 / numbers["weight_decode"],
            weight_sums=1 / numbers["weight_sums"],
            optimizer=numbers["optimizer_bytes"] / memory,
            momentum=numbers["momentum_bytes"] / memory,
        ),
        call_latency=numbers["call_latency"],
    )
