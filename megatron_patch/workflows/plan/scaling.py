"""How a recipe grows: 8 to 4,096 GPUs, with its own batch (strong) and with one that grows (weak)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from megatron_patch.workflows import tables
from megatron_patch.workflows.plan import methods
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.plan.step import simulate

SIZES = tuple(2**power for power in range(3, 13))
METHOD = "loco4_exact"


@dataclass(frozen=True)
class Point:
    """One size of a job."""

    kind: str
    """strong or weak."""
    gpus: int
    microbatches: int
    stock_seconds: float
    stock_efficiency: float
    """Tokens a second and GPU, of those of the same size without communication."""
    seconds: float
    """With METHOD."""
    efficiency: float


def grow(job: Job, cluster: Cluster, home: int) -> Iterator[Point]:
    """The points that are possible: at least one replica of the model, and one microbatch on each.

    Args:
        job: with the recipe's own batch.
        cluster: of any number of nodes.
        home: the GPUs that the recipe was made for, whose batch a replica keeps in weak scaling.
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


def table(name: str, found: list[Point]) -> Table:
    """One recipe's growth."""
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
