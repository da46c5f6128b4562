"""One line where a run's setting is likely to cost, or to gain next to nothing: for `train`, `--dry-run`."""

from __future__ import annotations

import argparse

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import cluster_file, constants, methods, recommend
from megatron_patch.workflows.plan import job as jobs
from megatron_patch.workflows.plan.step import simulate
from megatron_patch.workflows.run.configuration import RunConfig


def line(run: RunConfig, args: argparse.Namespace, recipe: str) -> str | None:
    """What to say of a run on GPUs whose compression gains less than is worth it; None: nothing.

    The GPU and its links are the plan's defaults: nobody knows here where the run will be.
    """
    if run.launch.device != "cuda" or not run.attach:
        return None
    method = methods.of_config(run.compression)
    if method.stock or run.launch.world_size == 1:
        return None
    try:
        job = jobs.of_arguments(recipe, args)
    except UserError:
        return None  # a model that the plan does not know
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
        return f"gain {recommend.percent(gain - 1)}"
    return f"cost {recommend.percent(1 / gain - 1)}"
