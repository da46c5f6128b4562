"""Predicts cells of the network benchmark from measurements without compression.

The ranks share one machine's cores, and gloo's transport uses them too. The sources of each quantity:

    computing, the optimizer     the cells of bf16_alltoall and bf16_allreduce without rate limits, with one
                                 and four microbatches; they also give gloo's all-gather per byte, and the
                                 sum of an all-to-all. These cells are given, not predicted
    a link's usable share        bf16_alltoall at one rate that no predicted cell has
    gloo's all-to-all            `--links` of the benchmark without a rate limit: the collectives alone
    a bucket's call              bf16_alltoall with more buckets: what each of them adds to a step
    compression, weight code     `benchmarks.kernels --typical` on one core

No source is a cell with compression. The exact gather's bits are those of docs/weight_gather.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.network.methods import ALL_REDUCE, BASELINE
from megatron_patch.workflows.plan import methods, torch_step
from megatron_patch.workflows.plan.cluster import (
    ALL_GATHER,
    ALL_TO_ALL,
    COLLECTIVES,
    Call,
    Cluster,
    Group,
    Link,
    Processor,
)
from megatron_patch.workflows.plan.job import MEGATRON, Job, Parameter, PipelineStage
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.plan.recommend import simulate

_PARTS = {ALL_TO_ALL: "exchange_seconds", ALL_GATHER: "gather_seconds"}
"""The columns that have the time of each collective in a stock step."""
_STRATEGIES = {"ddp": "ddp", "fsdp2": "fsdp2", "hsdp": "hybrid", "mfsdp": "optim_grads"}
"""The planner's strategy for the first word of a method's name in the benchmark."""
_NEVER = 1e15
ALL, INSIDE, BETWEEN = "all", "inside", "between"
"""The parts of a group whose collectives were measured: all, a host's ranks, or one rank of each host."""
_RANKS = 4
"""The calibration's runs have 4 hosts with one rank each."""


@dataclass(frozen=True)
class Cell:
    """One cell of the network benchmark."""

    hosts: int
    ranks_per_host: int
    name: str
    rate_mbit: float | None
    accumulation: int

    @property
    def given(self) -> bool:
        """Whether the cell is part of the calibration, so that it is no prediction."""
        alone = (self.hosts, self.ranks_per_host, self.rate_mbit) == (_RANKS, 1, None)
        return alone and self.name in (BASELINE, ALL_REDUCE)


@dataclass(frozen=True)
class Hosts(Cluster):
    """Hosts whose ranks share one machine's cores. Gloo exchanges in the ranks' own threads."""

    efficiency: Mapping[str, float] = field(default_factory=dict)
    """The share of the links' bandwidth that each collective reaches."""
    transport: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """For each (part of the group, collective), the processor's seconds per call and per byte that the rank
    sends. A missing entry is that of `all`."""

    @property
    def one_stream(self) -> bool:
        return True

    def needs(self, call: Call) -> dict[str, float]:
        part = INSIDE if call.group.nodes == 1 else BETWEEN if call.group.local == 1 else ALL
        of_call, of_byte = self.transport.get((part, call.kind)) or self.transport[ALL, call.kind]
        return {
            "uplink": call.uplink / self.efficiency.get(call.kind, 1.0),
            "inside": call.inside,
            "processor": of_call * call.calls + of_byte * call.sent,
        }

    def stock_reduce(self, elements: int, nbytes: int, group: Group, fp32_sum: bool) -> Call:
        call = super().stock_reduce(elements, nbytes, group, fp32_sum)
        if fp32_sum:
            return call
        # gloo's reduce-scatter moves twice the bytes over the links (docs/benchmarks.md).
        return dataclasses.replace(call, uplink=2 * call.uplink, inside=2 * call.inside)

    def all_reduce(self, elements: int, nbytes: int, group: Group) -> tuple[Call, Call]:
        # It is another ring, of which each half moves as many bytes as an all-gather.
        half = self.gather(elements * nbytes / group.ranks, group)
        return half, half


def predicted(cell: Cell, calibration: Mapping[str, Any]) -> float:
    """Predict the seconds of a cell's step; `calibration` is one (docs/plan/calibration.yaml)."""
    method = method_of(cell.name)
    replicated = method.distributed is False
    job = _job(calibration, cell, replicated)
    cluster = _cluster(calibration, cell, job)
    strategy = _STRATEGIES.get(cell.name.partition("_")[0], MEGATRON)
    return simulate(torch_step.planned_with(job, strategy), cluster, method).seconds


def method_of(name: str) -> Method:
    """Return the planner's method for a method's name in the benchmark."""
    wrapped, _, rest = name.partition("_")
    if wrapped in _STRATEGIES:
        known = {"bf16": methods.STOCK, "bf16_exact": "none_exact"}
        code, *exact = rest.split("_")
        return methods.parse(known.get(rest) or "_".join([code, "flat", *exact]))
    if name == BASELINE:
        return methods.parse(methods.STOCK)
    if name == ALL_REDUCE:
        return methods.parse(methods.REPLICATED)
    if name == "onebit_adam":  # Its optimizer is replicated in the benchmark.
        return dataclasses.replace(methods.parse(methods.ONEBIT), distributed=False, exact=False)
    method = methods.parse(name)
    return method if method.hops != "auto" else dataclasses.replace(method, hops="flat")


def _job(calibration: Mapping[str, Any], cell: Cell, replicated: bool) -> Job:
    llama = calibration["llama"]
    world = cell.hosts * cell.ranks_per_host
    return Job(
        name=cell.name,
        stages=(stage_of(llama),),
        tensor=1,
        pipeline=1,
        context=1,
        expert=1,
        expert_tensor=1,
        virtual=1,
        micro_batch=llama["microbatch"],
        global_batch=llama["microbatch"] * cell.accumulation * world,
        sequence=llama["sequence"],
        layers=llama["layers"],
        gradient_bytes=2,
        weight_bytes=2,
        overlap_gradients=True,
        overlap_weights=False,
        distributed=not replicated,
        fp32_accumulation=True,
        bucket_size=max(1, _parameters(llama) // calibration["buckets"]),
        exact_ratio=0.0,
        after_backward=True,
        weight_bits=calibration["weight_bits"],
    )


def _parameters(llama: Mapping[str, int]) -> int:
    return sum(parameter.numel for parameter in stage_of(llama).parameters)


def stage_of(llama: Mapping[str, int]) -> PipelineStage:
    """Return the network benchmark's model (network/training.py), in Megatron's order of registration."""
    hidden, ffn, rows = llama["hidden"], llama["ffn"], llama["vocabulary"]

    def matrix(*shape: int) -> Parameter:
        return Parameter(shape, 2.0 * shape[0] * shape[1])

    layer = [
        Parameter((hidden,)),
        matrix(hidden, hidden),
        matrix(3 * hidden, hidden),
        Parameter((hidden,)),
        matrix(2 * ffn, hidden),
        matrix(hidden, ffn),
    ]
    ends = [Parameter((hidden,)), matrix(rows, hidden)]
    return PipelineStage((Parameter((rows, hidden)), *layer * llama["layers"], *ends))


def _cluster(calibration: Mapping[str, Any], cell: Cell, job: Job) -> Cluster:
    # What a rank has of a core while all ranks compute; rates of the calibration are those of a whole core.
    share = min(1.0, calibration["cores"] / (cell.hosts * cell.ranks_per_host))
    rate = _NEVER if cell.rate_mbit is None else cell.rate_mbit * 1e6 / 8
    kernels = calibration["kernels"]
    compute = Computing.of(calibration, job)
    processor = Processor(
        flops=compute.flops * share,
        compress={int(bits): 1 / (speed * share) for bits, speed in kernels["compress"].items()},
        decompress=1 / (kernels["decompress"] * share),
        weight_encode=1 / (kernels["weight_encode"] * share),
        weight_decode=1 / (kernels["weight_decode"] * share),
        weight_sums=2 / (kernels["memcpy_bytes"] * share),
        optimizer=compute.optimizer / share,
        # 1-bit Adam's update replaces AdamW's, which is part of `optimizer`.
        momentum=(1 / kernels["form"] + 1 / kernels["update"] - 1 / kernels["adamw"]) / share,
        stock_sum=compute.stock_sum / share,
        step=compute.step / share,
    )
    efficiency = {name: carried(calibration, name) for name in COLLECTIVES}
    transport = compute.transport(calibration, cell.ranks_per_host)
    of_rank = {key: (call / share, unit / share) for key, (call, unit) in transport.items()}
    return Hosts(
        *(cell.hosts, cell.ranks_per_host, Link(rate), Link(_NEVER), processor),
        efficiency=efficiency,
        transport=of_rank,
    )


def carried(calibration: Mapping[str, Any], collective: str) -> float:
    """Return the share of a link's rate that a collective reaches in the uncompressed run over slow links.

    The reduce-scatter is assumed to reach as much as the all-gather, because both are rings.
    """
    rows = [
        row for row in calibration["uncompressed"] if row["rate_mbit"] is not None and row["name"] == BASELINE
    ]
    bits = 8 * 2 * _parameters(calibration["llama"]) * (1 - 1 / _RANKS)
    part = _PARTS[ALL_TO_ALL if collective == ALL_TO_ALL else ALL_GATHER]
    # Each bucket is summed before the next one is sent, and the link is idle meanwhile; gathers have no sum.
    idle = _sums(calibration) if collective == ALL_TO_ALL else 0.0
    return statistics.fmean(bits / (row[part] - idle) / (row["rate_mbit"] * 1e6) for row in rows)


def _sums(calibration: Mapping[str, Any]) -> float:
    """Return the seconds of the sums in an uncompressed exchange: those that its collectives do not take."""
    _, unit = fit(_free(calibration, ALL_TO_ALL))
    sent = 2 * _parameters(calibration["llama"]) * (1 - 1 / _RANKS)
    return max(
        0.0,
        _part(calibration, ALL_TO_ALL) - _buckets(calibration) * _call(calibration, ALL_TO_ALL) - unit * sent,
    )


def _part(calibration: Mapping[str, Any], collective: str, buckets: int | None = None) -> float:
    """Return the median seconds of a stock step's exchange or gather without rate limits."""
    return statistics.median(
        row[_PARTS[collective]] for row in _unshaped(calibration, buckets) if row["name"] == BASELINE
    )


def _unshaped(calibration: Mapping[str, Any], buckets: int | None = None) -> list[dict[str, Any]]:
    """Return the uncompressed runs without rate limits, with `buckets`, or as many as the cells have."""
    wanted = buckets or calibration["buckets"]
    return [
        row
        for row in calibration["uncompressed"]
        if row["rate_mbit"] is None and row.get("buckets", calibration["buckets"]) == wanted
    ]


def _buckets(calibration: Mapping[str, Any], asked: int | None = None) -> int:
    """Return how many buckets Megatron makes of the gradients if `asked` are requested."""
    cell = Cell(_RANKS, 1, BASELINE, None, 1)
    job = _job({**calibration, "buckets": asked or calibration["buckets"]}, cell, False)
    return len(job.buckets(0, Cluster(_RANKS, 1, Link(_NEVER), Link(_NEVER), Processor(1.0)), False))


def _call(calibration: Mapping[str, Any], collective: str) -> float:
    """Return the seconds that one more bucket adds to a step, from runs with more buckets.

    No run has a reduce-scatter, whose seconds are therefore those of the collective alone.
    """
    if collective not in _PARTS:
        return fit(_free(calibration, collective))[0]
    counts = {row.get("buckets", calibration["buckets"]) for row in calibration["uncompressed"]}
    few, many = min(counts), max(counts)
    more = _part(calibration, collective, many) - _part(calibration, collective, few)
    return max(0.0, more / (_buckets(calibration, many) - _buckets(calibration, few)))


def _free(
    calibration: Mapping[str, Any], collective: str, scope: str = ALL, per_host: int = 1
) -> list[tuple[float, float]]:
    """Return the (bytes, seconds) of a collective that was measured alone, without a rate limit."""
    wanted = (collective, scope, per_host, None)
    names = ("collective", "scope", "ranks_per_host", "rate_mbit")
    return [
        (float(timed["bytes"]), float(timed["seconds"]))
        for timed in calibration["links"]
        if tuple(timed[name] for name in names) == wanted
    ]


def fit(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (seconds per call, seconds per byte), not below 0, by least squares of relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    sizes, seconds = np.array(curve).T
    fitted, _ = nnls(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(curve)))
    return float(fitted[0]), max(float(fitted[1]), 1e-15)


@dataclass(frozen=True)
class Computing:
    """The processor's rates in the uncompressed run, in seconds of one core."""

    flops: float
    optimizer: float
    """Seconds per parameter that a rank updates."""
    step: float
    stock_sum: float
    """Seconds per element of a bucket."""
    all_gather: float
    """Seconds per byte sent."""

    @staticmethod
    def of(calibration: Mapping[str, Any], job: Job) -> Computing:
        """Derive the rates from the calibration's `uncompressed` rows, of 4 hosts with one rank each."""
        free = _unshaped(calibration)

        def seconds(name: str, count: int, part: str = "compute_seconds") -> float:
            chosen = [row for row in free if (row["name"], row["accumulation"]) == (name, count)]
            return statistics.median(row[part] for row in chosen)

        share = calibration["cores"] / _RANKS
        sharded, whole = ([seconds(name, count) for count in (1, 4)] for name in (BASELINE, ALL_REDUCE))
        batch = statistics.fmean((four - one) / 3 for one, four in (sharded, whole))
        fixed, fixed_whole = (
            max(0.0, statistics.fmean((one - batch, four - 4 * batch))) for one, four in (sharded, whole)
        )
        numel = _parameters(calibration["llama"])
        optimizer = max(0.0, (fixed_whole - fixed) * share / (numel * (1 - 1 / _RANKS)))
        operations = 3 * job.stages[0].operations * job.micro_batch * job.sequence
        calls = _buckets(calibration) * _call(calibration, ALL_GATHER)
        sent = 2 * numel * (1 - 1 / _RANKS)
        return Computing(
            flops=operations / (batch * share),
            optimizer=optimizer,
            step=max(0.0, fixed * share - optimizer * numel / _RANKS),
            stock_sum=_sums(calibration) * share / numel,
            all_gather=max(0.0, _part(calibration, ALL_GATHER) - calls) * share / sent,
        )

    def transport(
        self, calibration: Mapping[str, Any], per_host: int
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """Return gloo's processor time, from the curves without a rate limit and the run's all-gather."""
        share = calibration["cores"] / _RANKS
        works = {}
        for name in COLLECTIVES:
            alone, unit = fit(_free(calibration, name))
            call = _call(calibration, name)
            works[ALL, name] = share * call, self.all_gather if name == ALL_GATHER else share * unit
            for scope in (INSIDE, BETWEEN) if per_host > 1 else ():
                if curve := _free(calibration, name, scope, per_host):
                    alone_there, unit = fit(curve)
                    works[scope, name] = share * max(0.0, alone_there + call - alone), share * unit
        return works


@dataclass(frozen=True)
class Compared:
    """A cell's measured and predicted step, with the speed-ups over bf16_alltoall on the same links."""

    cell: Cell
    measured: float
    predicted: float
    ratio_measured: float | None
    ratio_predicted: float | None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def ratio_error(self) -> float | None:
        """The relative error of the predicted speed-up; None for the baseline and for given cells."""
        if self.ratio_measured is None or self.ratio_predicted is None:
            return None
        return self.ratio_predicted / self.ratio_measured - 1


def compared(rows: Sequence[Mapping[str, str]], calibration: Mapping[str, Any]) -> list[Compared]:
    """Return every cell of a file such as docs/plan/network.csv, in order."""
    cells = []
    for row in rows:
        rate = float(row["rate_mbit"]) if row["rate_mbit"] else None
        cell = Cell(
            int(row["hosts"]), int(row["ranks_per_host"]), row["name"], rate, int(row["accumulation"])
        )
        cells.append((cell, float(row["step_seconds"]), predicted(cell, calibration)))
    base = {_place(cell): (seconds, by) for cell, seconds, by in cells if cell.name == BASELINE}
    result = []
    for cell, seconds, by in cells:
        stock = None if cell.name == BASELINE or cell.given else base.get(_place(cell))
        ratios = (stock[0] / seconds, stock[1] / by) if stock else (None, None)
        result.append(Compared(cell, seconds, by, *ratios))
    return result


def _place(cell: Cell) -> tuple[int, int, float | None, int]:
    return cell.hosts, cell.ranks_per_host, cell.rate_mbit, cell.accumulation


def fastest(cells: Sequence[Compared]) -> dict[tuple[int, int, float | None, int], tuple[str, str]]:
    """Return the measured and the predicted fastest method for each links and accumulation count."""
    places: dict[tuple[int, int, float | None, int], list[Compared]] = {}
    for cell in cells:
        places.setdefault(_place(cell.cell), []).append(cell)
    return {
        place: (
            min(ones, key=lambda one: one.measured).cell.name,
            min(ones, key=lambda one: one.predicted).cell.name,
        )
        for place, ones in places.items()
    }
