"""Describes a cluster: its nodes, the links between and inside them, and each rank's processor.

Links follow the alpha-beta model: a call of a collective takes its latencies, and its bytes divided by the
bandwidth. The ranks of a node share its uplink (`between`); each rank has its own link to the other ranks of
its node (`inside`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_patch.workflows.plan import constants, measured
from megatron_patch.workflows.plan.constants import Gpu

ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER = "all_to_all", "reduce_scatter", "all_gather"
COLLECTIVES = (ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER)


@dataclass(frozen=True)
class Link:
    """A link: bytes per second in each direction, and seconds for each step of a collective."""

    bandwidth: float
    latency: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """The share of the bandwidth that each collective reaches; 1 for a collective that is not named."""

    def of(self, collective: str) -> float:
        """Return the bandwidth that a collective reaches."""
        return self.bandwidth * self.efficiency.get(collective, 1.0)


@dataclass(frozen=True)
class Work:
    """The seconds that a rank's processor takes for each call, and for each unit (byte, element, ...)."""

    call: float = 0.0
    unit: float = 0.0

    def seconds(self, units: float, calls: float = 1.0) -> float:
        return self.call * calls + self.unit * units


@dataclass(frozen=True)
class Processor:
    """The processor of one rank.

    A GPU's collectives take no time of it here, while gloo's take the processor's time (`transport`). Rates
    are those of a rank that computes alone; `share` says what it has of them if ranks share cores.
    """

    flops: float
    """Useful operations per second: the peak times its utilisation."""
    memory_bytes: float = float("inf")
    compress: Mapping[int, Work] = field(default_factory=dict)
    """For each number of bits, the work per element; the key 0 stands for all other numbers."""
    decompress: Work = Work()
    """Work per code (elements times senders)."""
    weight_encode: Work = Work()
    weight_decode: Work = Work()
    weight_sums: Work = Work()
    """The work per weight, as for the two above."""
    optimizer: Work = Work()
    """Work per parameter that the rank updates."""
    momentum: Work = Work()
    """Additional work per parameter with 1-bit Adam."""
    stock_sum: Work = Work()
    """Work per element and sender if the owner sums the results of a plain all-to-all."""
    step: float = 0.0
    """The seconds of a step that depend on none of the above."""
    transport: Mapping[tuple[str, str], Work] = field(default_factory=dict)
    """For each (scope of the group, collective), the work per call and per byte that the rank sends. A
    missing entry is that of the scope `all`. If empty, collectives take no processor time."""
    share: float = 1.0
    """The share of a processor that a rank has while all ranks compute: cores / ranks."""

    def compress_work(self, bits: int) -> Work:
        return self.compress.get(bits, self.compress.get(0, Work()))


@dataclass(frozen=True)
class Cluster:
    """A cluster of `nodes` times `per_node` ranks."""

    nodes: int
    per_node: int
    between: Link
    inside: Link
    processor: Processor
    call_latency: float = 0.0
    """The seconds that each call of a collective takes."""
    measured: str = ""
    """The file in which the links were measured; empty if they come from data sheets."""

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def with_inter(self, bytes_per_second: float) -> Cluster:
        """Return this cluster with another bandwidth between nodes."""
        return dataclasses.replace(
            self, between=dataclasses.replace(self.between, bandwidth=bytes_per_second)
        )


def of_gpus(
    gpu: Gpu,
    nodes: int,
    per_node: int,
    inter_gbit: float,
    intra_gbyte: float | None,
    mfu: float | None,
    compress_rate: float | None,
) -> Cluster:
    """Return a cluster of GPUs from data sheets and measured.py; `plan` has options of the same names."""
    numbers = measured.numbers_of(gpu)

    def value(name: str) -> float:
        return numbers[name].value

    own = 1.0 if compress_rate is None else compress_rate / value("compress")
    memory = gpu.memory_gbyte * 1e9 * value("memory_share")
    inside = value("intra_efficiency") * (gpu.link_gbyte if intra_gbyte is None else intra_gbyte) * 1e9
    return Cluster(
        nodes=nodes,
        per_node=per_node,
        between=Link(inter_gbit * 1e9 / 8 * value("tcp_headers"), value("inter_latency")),
        inside=Link(inside, value("intra_latency")),
        processor=Processor(
            flops=gpu.tflops * 1e12 * (value("mfu") if mfu is None else mfu),
            memory_bytes=gpu.memory_gb * 1e9,
            compress={0: Work(unit=1 / (value("compress") * own))},
            decompress=Work(unit=1 / (value("decompress") * own)),
            weight_encode=Work(unit=1 / value("weight_encode")),
            weight_decode=Work(unit=1 / value("weight_decode")),
            weight_sums=Work(unit=1 / value("weight_sums")),
            optimizer=Work(unit=value("optimizer_bytes") / memory),
            momentum=Work(unit=value("momentum_bytes") / memory),
        ),
        call_latency=value("call_latency"),
    )


def on_cpu(cluster: Cluster, cores: int) -> Cluster:
    """Return this cluster with ranks that share a node's CPU cores; `flops` is NaN, that is not known."""
    rate = constants.value
    processor = Processor(
        flops=math.nan,
        compress={0: Work(unit=1 / rate("cpu_compress"))},
        decompress=Work(unit=1 / rate("cpu_decompress")),
        weight_encode=Work(unit=1 / rate("cpu_weight_encode")),
        weight_decode=Work(unit=1 / rate("cpu_weight_decode")),
        weight_sums=Work(unit=1 / rate("cpu_weight_sums")),
        optimizer=Work(unit=1 / rate("cpu_optimizer")),
        share=min(1.0, cores / cluster.per_node),
    )
    return dataclasses.replace(cluster, processor=processor)
