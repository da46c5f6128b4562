"""Makes a plan's results: a row for each method, the recommended method, and a recipe's scaling."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron_patch.errors import UserError
from megatron_patch.workflows import tables
from megatron_patch.workflows.plan import (
    cluster_file,
    constants,
    exchange,
    methods,
    outer_steps,
    step,
    torch_step,
)
from megatron_patch.workflows.plan import job as jobs
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import MEGATRON, Job
from megatron_patch.workflows.plan.methods import BF16, Method
from megatron_patch.workflows.plan.step import Step
from megatron_patch.workflows.run.configuration import RunConfig

GRID = tuple(10 ** (place / 4) for place in range(15))
"""The chart's bandwidths of a node's uplink in Gbit/s, from 1 to 3,162."""


@dataclass(frozen=True)
class Row:
    """The prediction for one method on one cluster."""

    method: Method
    step: Step
    tokens_per_second: float
    memory_bytes: float
    fits: bool
    speedup: float
    """The step's speed-up over Megatron's own exchange with the recipe's flags."""
    pays_below: float | None = None
    """It gains `worth` or more below this bandwidth of a node's uplink in Gbit/s; 0: never, inf: always."""

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True)
class Advice:
    """The recommended method and the reason."""

    row: Row
    reason: str
    stays: bool
    """Whether the recommendation is Megatron's own exchange with the recipe's flags."""


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate a step under the job's strategy."""
    if method.outer_interval > 1:
        outer_steps.check(job, cluster, method)
        return outer_steps.simulate(job, cluster, method)
    return (step if job.strategy == MEGATRON else torch_step).simulate(job, cluster, method)


def rows(job: Job, cluster: Cluster, chosen: Sequence[Method]) -> list[Row]:
    """Return a row for each method; speed-ups are relative to the first method."""
    found: list[Row] = []
    needed_by = exchange.bytes_of if job.strategy == MEGATRON else torch_step.memory_bytes
    for method in chosen:
        made = simulate(job, cluster, method)
        needs = outer_steps.memory_bytes if method.outer_interval > 1 else needed_by
        needed = needs(job, cluster, method)
        room = cluster.processor.memory_bytes * constants.value("activation_reserve")
        base = found[0].seconds if found else made.seconds
        tokens = job.tokens(cluster.world) / made.seconds
        found.append(Row(method, made, tokens, needed, needed <= room, base / made.seconds))
    return found


def curves(job: Job, cluster: Cluster, chosen: Sequence[Method]) -> dict[str, list[float]]:
    """Return each method's seconds of a step at the bandwidths of `GRID`, for clusters of several nodes."""
    return {
        method.name: [simulate(job, cluster.with_inter(gbit * 1e9 / 8), method).seconds for gbit in GRID]
        for method in chosen
    }


def pays_below(stock: Sequence[float], other: Sequence[float], worth: float) -> float:
    """Return the Gbit/s below which `other` is faster by `worth` or more; both are curves over GRID."""
    gains = [one / two - 1 - worth for one, two in zip(stock, other, strict=True)]
    if gains[-1] >= 0:
        return math.inf
    for place in range(len(GRID) - 2, -1, -1):
        if gains[place] >= 0:
            share = gains[place] / (gains[place] - gains[place + 1])
            low, high = math.log(GRID[place]), math.log(GRID[place + 1])
            return math.exp(low + share * (high - low))
    return 0.0


def advise(job: Job, cluster: Cluster, found: Sequence[Row], worth: float) -> Advice:
    """Recommend, of the methods that are within `worth` of the fastest, the one that changes least.

    `found` begins with the method that changes least. Methods that do not fit in memory are left out,
    unless none fits. Outer steps are never recommended, because they are another training.
    """
    stock = found[0]
    together = [row for row in found if row.method.outer_interval == 1]
    fitting = [row for row in together if row.fits] or together
    fastest = min(row.seconds for row in fitting)
    best = next(row for row in fitting if row.seconds <= fastest * (1 + worth))
    waits = stock.step.exposed / stock.seconds
    batches = job.microbatches(cluster.world)
    count = f"{batches} microbatch" + ("es" if batches > 1 else "")
    if best is stock and waits < worth:
        why = (
            f"your exchange hides behind {count}: {percent(waits)} of the step waits for it: stay with stock"
        )
        return Advice(best, why, True)
    if best is stock:
        gain = stock.seconds / fastest - 1
        least = percent(max(gain, 0.0))
        why = f"nothing gains more than {least} of a step of {_time(stock.seconds)}: stay with stock"
        return Advice(best, why, True)
    why = (
        f"with {count} {percent(waits)} of stock's step of {_time(stock.seconds)} waits for the exchange; "
        f"{best.method.name} takes {_time(best.seconds)}, {best.speedup:.2f} times as fast"
    )
    with_bf16 = [row.seconds for row in found if row.method.name == BF16 and row is not best]
    if with_bf16:
        why += f" ({with_bf16[0] / best.seconds:.2f} times as with gradients in bf16)"
    if cluster.nodes > 1 and best.step.uplink_bytes < 0.99 * stock.step.uplink_bytes:
        why += (
            f", and a node sends {best.step.uplink_bytes / 1e9:.2f} GB a step instead of "
            f"{stock.step.uplink_bytes / 1e9:.2f}"
        )
    if not stock.fits and best.fits:
        why += "; stock does not fit in the GPU's memory"
    return Advice(best, why, False)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


SIZES = tuple(2**power for power in range(3, 13))
METHOD = "loco4_exact"


@dataclass(frozen=True)
class Point:
    """The prediction for one number of GPUs."""

    kind: str
    """strong or weak."""
    gpus: int
    microbatches: int
    stock_seconds: float
    stock_efficiency: float
    """The throughput as a share of that without communication."""
    seconds: float
    """The seconds of a step with METHOD; `stock_seconds` are those of Megatron's own exchange."""
    efficiency: float


def grow(job: Job, cluster: Cluster, home: int) -> Iterator[Point]:
    """Yield the sizes that hold at least one replica of the model, with one microbatch or more on each.

    Args:
        job: the job with the recipe's own batch.
        cluster: the cluster, whose number of nodes is not used.
        home: the number of GPUs for which the recipe was made; weak scaling keeps a replica's batch on it.
    """
    stock, other = methods.parse(methods.STOCK), methods.parse(METHOD)
    each = job.tensor * job.pipeline * job.context
    each = max(each, job.pipeline * job.expert * job.expert_tensor)
    for kind in ("strong", "weak"):
        for gpus in SIZES:
            if gpus % each or gpus % cluster.per_node:
                continue
            there = dataclasses.replace(cluster, nodes=gpus // cluster.per_node)
            batch = job.global_batch
            if kind == "weak":
                batch = job.micro_batch * job.microbatches(home) * job.replicas(gpus)
            if batch % (job.micro_batch * job.replicas(gpus)):
                continue
            at = dataclasses.replace(job, global_batch=batch)
            first, second = simulate(at, there, stock), simulate(at, there, other)
            yield Point(
                kind,
                gpus,
                at.microbatches(gpus),
                first.seconds,
                1 - first.exposed / first.seconds,
                second.seconds,
                1 - second.exposed / second.seconds,
            )


def scaling_table(name: str, found: list[Point]) -> Table:
    """Return the table of one recipe's strong and weak scaling."""
    columns = ("scaling", "GPUs", "microbatches", "stock (s)", "not waiting", f"{METHOD} (s)", "not waiting")
    rows = [
        (
            point.kind,
            f"{point.gpus:,}",
            str(point.microbatches),
            f"{point.stock_seconds:.3f}",
            f"{point.stock_efficiency:.0%}",
            f"{point.seconds:.3f}",
            f"{point.efficiency:.0%}",
            f"{point.stock_seconds / point.seconds:.2f} x",
        )
        for point in found
    ]
    return tables.terminal((*columns, "speed-up"), rows, left=("scaling",), title=name)


def hint(run: RunConfig, args: argparse.Namespace, recipe: str) -> str | None:
    """Return a line for the user if compression is predicted to gain too little in a run on GPUs, else None.

    The GPU and its links are the plan's defaults, because the cluster of the run is not known here.
    """
    if run.launch.device != "cuda" or not run.attach:
        return None
    method = methods.of_config(run.compression)
    if method.stock or run.launch.world_size == 1:
        return None
    try:
        job = jobs.of_arguments(recipe, args)
    except UserError:
        return None  # The planner does not know this model.
    cluster = cluster_file.build({}, run.launch.nnodes, run.launch.nproc_per_node)
    gain = (
        simulate(job, cluster, methods.parse(methods.STOCK)).seconds / simulate(job, cluster, method).seconds
    )
    if gain >= 1 + constants.value("worth"):
        return None
    count = job.microbatches(cluster.world)
    where = (
        f"{cluster_file.DEFAULT_INTER_GBIT:g} Gbit/s between nodes" if cluster.nodes > 1 else "a single node"
    )
    batches = f"{count} microbatch{'es' if count > 1 else ''}"
    return (
        f"plan: with {batches} a step and {where} compression is predicted to {_cost(gain)}; "
        f"megatron-loco plan {recipe} --inter-gbit B says what it is worth on your links"
    )


def _cost(gain: float) -> str:
    if gain >= 1:
        return f"gain {percent(gain - 1)}"
    return f"cost {percent(1 / gain - 1)}"
