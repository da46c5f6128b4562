"""What a job runs on: nodes, the links between and inside them, and what a rank computes with.

Links are alpha-beta: a call of a collective takes latencies, and its bytes over the bandwidth. A node's ranks
share its uplink (`between`); each rank has its own way to the others of its node (`inside`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.constants import GPUS, Gpu

ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER = "all_to_all", "reduce_scatter", "all_gather"
COLLECTIVES = (ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER)


@dataclass(frozen=True)
class Link:
    """Bytes a second in each direction, and seconds for each step of a collective."""

    bandwidth: float
    latency: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """By collective: what it reaches of the bandwidth; 1 where it is not named."""

    def of(self, collective: str) -> float:
        """The bandwidth that a collective reaches."""
        return self.bandwidth * self.efficiency.get(collective, 1.0)


@dataclass(frozen=True)
class Work:
    """Seconds that a rank's processor takes: fixed a call, and for each unit (byte, element, ...)."""

    call: float = 0.0
    unit: float = 0.0

    def seconds(self, units: float, calls: float = 1.0) -> float:
        """For so many units in so many calls."""
        return self.call * calls + self.unit * units


@dataclass(frozen=True)
class Processor:
    """What one rank computes with.

    A GPU's collectives take nothing of it here; gloo's take the processor's time (`transport`). Rates are for
    the rank alone: where ranks share cores, `cores` of them are there for the node's `ranks`.
    """

    flops: float
    """Useful operations a second: peak times utilisation."""
    memory_bytes: float = float("inf")
    """Bytes of memory."""
    compress: Mapping[int, Work] = field(default_factory=dict)
    """By bits, per element; 0: any other bits."""
    decompress: Work = Work()
    """Per code (elements times senders)."""
    weight_encode: Work = Work()
    weight_decode: Work = Work()
    weight_sums: Work = Work()
    """These three are per weight."""
    optimizer: Work = Work()
    """Per parameter that the rank updates."""
    momentum: Work = Work()
    """Per parameter, more, with 1-bit Adam."""
    stock_sum: Work = Work()
    """Per element and sender, where the owner sums a plain all-to-all."""
    step: float = 0.0
    """Seconds of a step that depend on nothing here."""
    transport: Mapping[tuple[str, str], Work] = field(default_factory=dict)
    """By (scope of the group, collective): processor time of a call, and for each byte that the rank sends.
    What is not named is as over all ranks. Empty: collectives take no processor."""
    share: float = 1.0
    """The share of a processor that a rank has while all compute: cores / ranks."""

    def compress_work(self, bits: int) -> Work:
        """To compress to so many bits."""
        return self.compress.get(bits, self.compress.get(0, Work()))


@dataclass(frozen=True)
class Cluster:
    """`nodes` times `per_node` ranks."""

    nodes: int
    per_node: int
    between: Link
    inside: Link
    processor: Processor
    call_latency: float = 0.0
    """Seconds of any collective's call."""
    measured: str = ""
    """Where its links were measured; empty: data sheets."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.nodes * self.per_node

    def with_inter(self, bytes_per_second: float) -> Cluster:
        """The same with another bandwidth between nodes."""
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
    """A cluster of GPUs from data sheets and constants.py; parameters are the options of `plan` so called."""
    value = constants.value
    speed = _kernel_speed(gpu)
    own = speed if compress_rate is None else compress_rate / value("compress")
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
            weight_encode=Work(unit=1 / (value("weight_encode") * speed)),
            weight_decode=Work(unit=1 / (value("weight_decode") * speed)),
            weight_sums=Work(unit=1 / (value("weight_sums") * speed)),
            optimizer=Work(unit=value("optimizer_bytes") / memory),
            momentum=Work(unit=value("momentum_bytes") / memory),
        ),
        call_latency=value("call_latency"),
    )


def on_cpu(cluster: Cluster, cores: int) -> Cluster:
    """The same links with ranks that share so many cores of a node; their arithmetic's rate is not known."""
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


def _kernel_speed(gpu: Gpu) -> float:
    """The kernels' speed beside an H100's: by instructions or memory, whichever is less."""
    h100 = GPUS["H100"]
    return min(gpu.lanes / h100.lanes, gpu.memory_gbyte / h100.memory_gbyte)
