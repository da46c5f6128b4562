"""Predictions of `bench network`'s cells, from what was measured without compression: how good is the model?

The ranks share one machine's cores, and gloo's transport takes them too. What is taken from where:

    computing, the optimizer     a run of `bench network` without rate limits: bf16_alltoall and bf16_allreduce, one and
                                 four microbatches; also gloo's all-gather by the byte, and the sum of an all-to-all
    gloo's calls, all-to-all     `bench network --links` without a rate limit: the collectives alone
    what a link carries          the same at one rate, which is none of the cells'
    compression, weight code     `bench kernels` on one core

None of it is a cell with compression. The exact gather's bits are an earlier run's (docs/network.md).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import methods
from megatron_patch.workflows.plan.cluster import ALL_GATHER, ALL_TO_ALL, COLLECTIVES, Cluster, Link, Processor, Work
from megatron_patch.workflows.plan.cluster_file import fit, points
from megatron_patch.workflows.plan.job import ALL, BETWEEN, INSIDE, Job
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.plan.model import Parameter, Stage
from megatron_patch.workflows.plan.step import simulate

_SETTINGS = ("llama", "buckets", "cores", "uncompressed", "links", "kernels", "weight_bits")
_NEVER = 1e15


@dataclass(frozen=True)
class Cell:
    """One cell of `bench network`."""

    hosts: int
    ranks_per_host: int
    name: str
    rate_mbit: float | None
    accumulation: int


def check_calibration(found: Mapping[str, Any]) -> None:
    """Refuse what is no calibration."""
    missing = [name for name in _SETTINGS if name not in found]
    if missing:
        raise UserError(f"calibration: {', '.join(missing)} missing")


def predicted(cell: Cell, found: Mapping[str, Any]) -> float:
    """Seconds of a step of the cell, by `found`, a calibration (docs/plan/calibration.yaml)."""
    method = method_of(cell.name)
    replicated = method.distributed is False
    job = _job(found, cell, replicated)
    return simulate(job, _cluster(found, cell, job), method).seconds


def method_of(name: str) -> Method:
    """The plan's method of one of bench network's names."""
    if name == "bf16_alltoall":
        return methods.parse(methods.STOCK)
    if name == "bf16_allreduce":
        return methods.parse(methods.REPLICATED)
    if name == "onebit_adam":  # replicated there
        return dataclasses.replace(methods.parse(methods.ONEBIT), distributed=False, exact=False)
    found = methods.parse(name)
    return found if found.hops != "auto" else dataclasses.replace(found, hops="flat")


def _job(found: Mapping[str, Any], cell: Cell, replicated: bool) -> Job:
    llama = found["llama"]
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
        gradient_bytes=2,
        weight_bytes=2,
        overlap_gradients=True,
        overlap_weights=False,
        distributed=not replicated,
        fp32_accumulation=True,
        bucket_size=max(1, _parameters(llama) // found["buckets"]),
        exact_ratio=0.0,
        after_backward=True,
        weight_bits=found["weight_bits"],
    )


def _parameters(llama: Mapping[str, int]) -> int:
    return sum(parameter.numel for parameter in stage_of(llama).parameters)


def stage_of(llama: Mapping[str, int]) -> Stage:
    """The benchmark's model (integration/bench/training.py), in Megatron's order of registration."""
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
    return Stage(tuple([Parameter((rows, hidden)), *layer * llama["layers"], *ends]))


def _cluster(found: Mapping[str, Any], cell: Cell, job: Job) -> Cluster:
    world = cell.hosts * cell.ranks_per_host
    share = found["cores"] / world
    rate = _NEVER if cell.rate_mbit is None else cell.rate_mbit * 1e6 / 8
    kernels = found["kernels"]
    compute = Computing.of(found, job)
    processor = Processor(
        flops=compute.flops,
        compress={int(bits): Work(unit=1 / speed) for bits, speed in kernels["compress"].items()},
        decompress=Work(unit=1 / kernels["decompress"]),
        weight_encode=Work(unit=1 / kernels["weight_encode"]),
        weight_decode=Work(unit=1 / kernels["weight_decode"]),
        weight_sums=Work(unit=2 / kernels["memcpy_bytes"]),
        optimizer=Work(unit=compute.optimizer),
        momentum=Work(unit=1 / kernels["momentum"]),
        stock_sum=Work(unit=compute.stock_sum),
        step=compute.step,
        transport=compute.transport(found, cell.ranks_per_host),
        share=share,
    )
    efficiency = {name: carried(found, name) for name in COLLECTIVES}
    return Cluster(cell.hosts, cell.ranks_per_host, Link(rate, 0.0, efficiency), Link(_NEVER), processor)


def carried(found: Mapping[str, Any], collective: str) -> float:
    """What a collective gets of a link's rate, from its curve at the calibration's rate."""
    curve = [one for one in _of_hosts(found) if one["rate_mbit"] is not None]
    _, unit = fit(points(curve, collective, ALL))
    share = 8 / (unit * curve[0]["rate_mbit"] * 1e6)
    return 2 * share if collective == "reduce_scatter" else share  # gloo's moves twice the bytes


def _of_hosts(found: Mapping[str, Any], per_host: int = 1) -> list[dict[str, Any]]:
    return [one for one in found["links"] if one["ranks_per_host"] == per_host]


@dataclass(frozen=True)
class Computing:
    """What the run without compression says of the processor; seconds are of one core."""

    flops: float
    optimizer: float
    """A parameter that a rank updates."""
    step: float
    stock_sum: float
    """An element of a bucket."""
    all_gather: float
    """A byte sent."""

    @staticmethod
    def of(found: Mapping[str, Any], job: Job) -> Computing:
        """From the calibration's `uncompressed` rows, of 4 hosts with one rank each."""
        rows = {(row["name"], row["accumulation"]): row for row in found["uncompressed"]}
        ranks = 4
        share = found["cores"] / ranks
        sharded = [rows["bf16_alltoall", count] for count in (1, 4)]
        whole = [rows["bf16_allreduce", count] for count in (1, 4)]
        batch = statistics.fmean((four["compute_seconds"] - one["compute_seconds"]) / 3 for one, four in (sharded, whole))
        fixed, fixed_whole = (
            max(0.0, statistics.fmean((one["compute_seconds"] - batch, four["compute_seconds"] - 4 * batch)))
            for one, four in (sharded, whole)
        )
        numel = _parameters(found["llama"])
        optimizer = max(0.0, (fixed_whole - fixed) * share / (numel * (1 - 1 / ranks)))
        operations = 3 * job.stages[0].operations * job.micro_batch * job.sequence
        cluster = Cluster(ranks, 1, Link(_NEVER), Link(_NEVER), Processor(flops=1.0))
        buckets = [bucket.elements for bucket in job.buckets(0, cluster, False)]
        free = [one for one in _of_hosts(found) if one["rate_mbit"] is None]
        call, unit = fit(points(free, ALL_TO_ALL, ALL))
        gather_call, _ = fit(points(free, ALL_GATHER, ALL))
        sent = 2 * (1 - 1 / ranks) * sum(buckets)
        exchange = statistics.fmean(row["exchange_seconds"] for row in sharded)
        gather = statistics.fmean(row["gather_seconds"] for row in sharded)
        return Computing(
            flops=operations / (batch * share),
            optimizer=optimizer,
            step=max(0.0, fixed * share - optimizer * numel / ranks),
            stock_sum=max(0.0, exchange - len(buckets) * call - unit * sent) * share / sum(buckets),
            all_gather=max(0.0, gather - len(buckets) * gather_call) * share / sent,
        )

    def transport(self, found: Mapping[str, Any], per_host: int) -> dict[tuple[str, str], Work]:
        """gloo's processor time, from the curves without a rate limit and the run's all-gather."""
        share = found["cores"] / 4
        works = {}
        for name in COLLECTIVES:
            free = [one for one in _of_hosts(found) if one["rate_mbit"] is None]
            call, unit = (share * value for value in fit(points(free, name, ALL)))
            works[ALL, name] = Work(call, self.all_gather if name == ALL_GATHER else unit)
            for scope in (INSIDE, BETWEEN) if per_host > 1 else ():
                several = [one for one in _of_hosts(found, per_host) if one["rate_mbit"] is None]
                if curve := points(several, name, scope):
                    call, unit = (share * value for value in fit(curve))
                    works[scope, name] = Work(call, unit)
        return works


def errors(measured: Sequence[float], found: Sequence[float]) -> tuple[float, float]:
    """(median, largest) of the relative errors of predictions."""
    off = [abs(one / two - 1) for one, two in zip(found, measured, strict=True)]
    return statistics.median(off), max(off)
