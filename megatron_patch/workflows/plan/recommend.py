"""Makes a plan's results: a row for each method, its seconds by bandwidth, and the recommendation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patch.workflows.plan import step, torch_step
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import MEGATRON, Job
from megatron_patch.workflows.plan.methods import BF16, Method
from megatron_patch.workflows.plan.step import Step

GRID = tuple(10 ** (place / 4) for place in range(15))
"""Bandwidths of a node's uplink in Gbit/s, from 1 to 3,162."""


@dataclass(frozen=True)
class Row:
    """The prediction for one method on one cluster."""

    method: Method
    step: Step
    tokens_per_second: float
    added_bytes: float
    """The memory of a rank that it needs more than the first method."""
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
    return (step if job.strategy == MEGATRON else torch_step).simulate(job, cluster, method)


def rows(job: Job, cluster: Cluster, methods: Sequence[Method]) -> list[Row]:
    """Return a row for each method; speed-ups are relative to the first method."""
    rows_: list[Row] = []
    for method in methods:
        simulated = simulate(job, cluster, method)
        added = (step if job.strategy == MEGATRON else torch_step).added_bytes(job, cluster, method)
        base = rows_[0].seconds if rows_ else simulated.seconds
        tokens = job.tokens(cluster.world) / simulated.seconds
        rows_.append(Row(method, simulated, tokens, added, base / simulated.seconds))
    return rows_


def curves(job: Job, cluster: Cluster, methods: Sequence[Method]) -> list[list[float]]:
    """Return each method's seconds of a step at the bandwidths of `GRID`, for clusters of several nodes."""
    clusters = [cluster.with_inter(gbit * 1e9 / 8) for gbit in GRID]
    return [[simulate(job, at, method).seconds for at in clusters] for method in methods]


def pays_below(stock: Sequence[float], other: Sequence[float], worth: float) -> float:
    """Return the Gbit/s below which `other` is faster by `worth` or more; both are curves over GRID."""
    gains = [base / seconds - 1 - worth for base, seconds in zip(stock, other, strict=True)]
    if gains[-1] >= 0:
        return math.inf
    for place in range(len(GRID) - 2, -1, -1):
        if gains[place] >= 0:
            share = gains[place] / (gains[place] - gains[place + 1])
            low, high = math.log(GRID[place]), math.log(GRID[place + 1])
            return math.exp(low + share * (high - low))
    return 0.0


def advise(job: Job, cluster: Cluster, rows: Sequence[Row], worth: float) -> Advice:
    """Recommend, of the methods that are within `worth` of the fastest, the one that changes least.

    `rows` begins with the method that changes least.
    """
    stock = rows[0]
    fastest = min(row.seconds for row in rows)
    best = next(row for row in rows if row.seconds <= fastest * (1 + worth))
    waits = stock.step.exposed / stock.seconds
    count = microbatches(job, cluster)
    if best is stock and waits < worth:
        why = (
            f"your exchange hides behind {count}: {_percent(waits)} of the step waits for it: stay with stock"
        )
        return Advice(best, why, True)
    if best is stock:
        least = _percent(max(stock.seconds / fastest - 1, 0.0))
        why = f"nothing gains more than {least} of a step of {_time(stock.seconds)}: stay with stock"
        return Advice(best, why, True)
    why = (
        f"with {count} {_percent(waits)} of stock's step of {_time(stock.seconds)} waits for the exchange; "
        f"{best.method.name} takes {_time(best.seconds)}, {best.speedup:.2f} times as fast"
    )
    with_bf16 = [row.seconds for row in rows if row.method.name == BF16 and row is not best]
    if with_bf16:
        why += f" ({with_bf16[0] / best.seconds:.2f} times as with gradients in bf16)"
    if cluster.nodes > 1 and best.step.uplink_bytes < 0.99 * stock.step.uplink_bytes:
        why += (
            f", and a node sends {best.step.uplink_bytes / 1e9:.2f} GB a step instead of "
            f"{stock.step.uplink_bytes / 1e9:.2f}"
        )
    if best.added_bytes >= 5e7:
        why += f"; it needs {best.added_bytes / 1e9:.1f} GB of memory more"
    return Advice(best, why, False)


def microbatches(job: Job, cluster: Cluster) -> str:
    count = job.microbatches(cluster.world)
    return f"{count} microbatch{'es' if count > 1 else ''}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
