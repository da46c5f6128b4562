"""Shows a plan as tables for the terminal, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_patch.workflows import tables
from megatron_patch.workflows.plan import constants, measured
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import MEGATRON, Job
from megatron_patch.workflows.plan.recommend import GRID, Advice, Row


def title(job: Job, cluster: Cluster, gpu: str) -> str:
    """Return one line on the job, the cluster and the layout that are planned."""
    links = f"{cluster.nodes} x {cluster.per_node} {gpu}"
    if cluster.nodes > 1:
        links += f", {8 * cluster.between.bandwidth / 1e9:.4g} Gbit/s usable between nodes"
    if cluster.measured:
        links += f" (measured: {cluster.measured})"
    replicas = job.replicas(cluster.world)
    batches = job.microbatches(cluster.world)
    split = f"TP {job.tensor}, PP {job.pipeline}, CP {job.context}, EP {job.expert}, DP {replicas}"
    if job.strategy != MEGATRON:
        split = f"{job.strategy} over {replicas} ranks"
    return (
        f"{job.name}: {links}; {split}; "
        f"{batches} microbatch{'es' if batches > 1 else ''} of {job.micro_batch} x {job.sequence} tokens; "
        f"{8 * job.gradient_bytes}-bit gradients, {8 * job.weight_bytes}-bit weights"
    )


def table(found: Sequence[Row], best: Row) -> Table:
    """Return the table of methods, in which `best` is marked."""
    columns = ("method", "step (s)", "speed-up", "tokens/s", "exposed (s)", "GB a node sends", "memory GB")
    rows = [
        (
            ("> " if row is best else "  ") + row.method.name,
            f"{row.seconds:.3f}",
            f"{row.speedup:.2f} x",
            f"{row.tokens_per_second:,.0f}",
            f"{row.step.exposed:.3f}",
            f"{row.step.uplink_bytes / 1e9:.3f}",
            f"{row.memory_bytes / 1e9:.1f}" + ("" if row.fits else " (!)"),
            below(row.pays_below),
        )
        for row in found
    ]
    shown = tables.terminal((*columns, "pays below"), rows, left=("method",))
    shown.columns[0].no_wrap = True
    return shown


def outer_steps(row: Row, cluster: Cluster) -> str:
    """Return a sentence on a row with outer steps, and the options that switch it on."""
    return (
        f"{row.method.name} takes {row.seconds:.3g} s, {row.speedup:.2f} times as fast, but is another "
        f"training: each node trains by itself for {row.method.outer_interval} steps; docs/outer_steps.md "
        f"has its cost in loss\n  {row.method.options} "
        f"megatron.num_distributed_optimizer_instances={cluster.nodes}"
    )


def below(gbit: float | None) -> str:
    """Format a break-even bandwidth of a row (Row.pays_below)."""
    if gbit is None:
        return "-"
    if gbit == 0:
        return "never"
    return "always" if math.isinf(gbit) else f"{gbit:.3g} Gbit/s"


def explanation(job: Job, cluster: Cluster, gpu: constants.Gpu) -> list[Table]:
    """Return the tables of `--explain`: every number of the planner, with its source."""
    numbers = tables.terminal(
        ("name", "value", "unit", "kind", "source"),
        [
            (name, f"{one.value:g}", one.unit, one.kind, one.source)
            for name, one in measured.numbers_of(gpu).items()
        ],
        left=("name", "unit", "kind", "source"),
        title="numbers",
    )
    numbers.add_row(
        "weight bits", f"{job.bits_of_weights:.2f}", "bits a weight", "measured",
        f"{constants.EXACT_SOURCE}; here {job.exact_ratio:.3g}; --weight-bits",
    )  # fmt: skip
    for field in ("tflops", "memory_gb", "memory_gbyte", "link_gbyte"):
        numbers.add_row(f"{gpu.name} {field}", f"{getattr(gpu, field):g}", "", "data sheet", gpu.source)
    columns = ("what", "value", "from")
    used = tables.terminal(columns, (), left=columns, title="this cluster")
    source = cluster.measured or "the options and the numbers above"
    processor = cluster.processor
    for what, value in (
        ("between nodes, a node, bytes/s", cluster.between.bandwidth),
        ("between nodes, seconds a step", cluster.between.latency),
        ("inside a node, a GPU, bytes/s", cluster.inside.bandwidth),
        ("inside a node, seconds a step", cluster.inside.latency),
        ("useful operations a second", processor.flops),
        ("compress, elements/s", 1 / unit if (unit := processor.compress_work(4).unit) else math.inf),
    ):
        used.add_row(what, f"{value:.4g}", source)
    for where, link in (("between", cluster.between), ("inside", cluster.inside)):
        for name, share in link.efficiency.items():
            used.add_row(f"{name} {where}, of that bandwidth", f"{share:.2f}", source)
    return [numbers, used]


def source_of(gpu: constants.Gpu) -> str:
    """Return the line below the table: what its numbers are."""
    kinds = [measured.numbers_of(gpu)[name].kind for name in measured.RATES]
    kernels = f"; {kinds.count('measured')} of {len(kinds)} kernels' rates were measured on this GPU"
    told = kernels if "measured" in kinds else ""
    return f"Predicted, not measured{told}; --explain shows every number and its source."


def as_json(
    job: Job,
    cluster: Cluster,
    gpu: constants.Gpu,
    found: Sequence[Row],
    advice: Advice,
    curves: dict[str, list[float]],
) -> dict[str, Any]:
    """Return the content that `--json` writes."""
    return {
        "recipe": job.name,
        "strategy": job.strategy,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "inter_bytes_per_second": cluster.between.bandwidth,
        "intra_bytes_per_second": cluster.inside.bandwidth,
        "links": cluster.measured or "data sheet",
        "microbatches": job.microbatches(cluster.world),
        "data_parallel_ranks": job.replicas(cluster.world),
        "weight_bits": job.bits_of_weights,
        "methods": [_row(row) for row in found],
        "recommended": advice.row.method.name,
        "options": advice.row.method.options,
        "reason": advice.reason,
        "stay_with_stock": advice.stays,
        "curves": {"inter_gbit": list(GRID), "step_seconds": curves} if curves else None,
        "constants": {name: dataclasses.asdict(one) for name, one in measured.numbers_of(gpu).items()},
    }


def _row(row: Row) -> dict[str, Any]:
    sent = max(row.step.sent, key=lambda s: s.uplink)
    below_ = row.pays_below
    return {
        "name": row.method.name,
        "options": row.method.options,
        "step_seconds": row.seconds,
        "speedup": row.speedup,
        "tokens_per_second": row.tokens_per_second,
        "exposed_seconds": row.step.exposed,
        "node_uplink_bytes": row.step.uplink_bytes,
        "rank_bytes": dataclasses.asdict(sent),
        "memory_bytes": row.memory_bytes,
        "fits": row.fits,
        "pays_below_gbit": None if below_ is None or math.isinf(below_) else below_,
        "pays_always": below_ is not None and math.isinf(below_),
    }


def draw(path: Path, plan: dict[str, Any]) -> None:
    """Draw the curves of a plan, as returned by `as_json`, as a PNG (or SVG) at `path`."""
    from megatron_patch.workflows.plots import pyplot

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    lines(axes, plan)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def lines(axes: Any, plan: dict[str, Any]) -> None:
    """Draw each method's speed, relative to stock at the same bandwidth, over the uplink's Gbit/s."""
    curves = plan["curves"]
    stock = curves["step_seconds"][plan["methods"][0]["name"]]
    styles = ("-", "--", ":", "-.")
    for number, (name, seconds) in enumerate(curves["step_seconds"].items()):
        gains = [base / one for base, one in zip(stock, seconds, strict=True)]
        best = name == plan["recommended"]
        axes.plot(
            curves["inter_gbit"], gains, styles[number % 4], linewidth=2.4 if best else 1.3,
            label=f"{name} (recommended here)" if best else name,
        )  # fmt: skip
    here = 8 * plan["inter_bytes_per_second"] / 1e9
    axes.axvline(here, color="black", linewidth=0.8)
    axes.annotate(
        "here", (here, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
    )
    axes.set_xscale("log")
    axes.set_xlabel("usable Gbit/s between nodes, of each node")
    axes.set_ylabel("speed, of stock's at that bandwidth")
    axes.set_title(
        f"{plan['recipe']}, {plan['nodes']} x {plan['gpus_per_node']} ranks, "
        f"{plan['microbatches']} microbatches a step (predicted)", fontsize=10,
    )  # fmt: skip
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
