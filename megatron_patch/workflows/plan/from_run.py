"""`plan --from RUN`: the compute rate, and the bits of the exact gather, of a run that was made."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import job as jobs
from megatron_patch.workflows.plan import methods
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.plan.step import simulate
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import RunConfig
from megatron_patch.workflows.run.prepare import prepare_run
from megatron_patch.workflows.run_reader import read_summary

_LEAST, _MOST = 1e6, 1e18
_HALVINGS = 60


def calibrated(cluster: Cluster, folder: Path) -> tuple[Cluster, float | None]:
    """`cluster` with the compute rate at which the run's own step takes what was measured; its weight bits.

    The run's exchange is simulated over the same links, with the run's own nodes and ranks.
    """
    summary = read_summary(folder)
    if not summary or not (folder / "config.yaml").is_file():
        raise UserError(f"--from: {folder}: no run that has ended is there (summary.json and config.yaml)")
    seconds = (summary.get("step_seconds") or {}).get("median")
    if not isinstance(seconds, int | float):
        raise UserError(f"--from: {folder / 'summary.json'}: has no step_seconds of a megatron-loco run")
    run = configuration.load(folder / "config.yaml")
    job = job_of(run, folder.name)
    own = dataclasses.replace(cluster, nodes=run.launch.nnodes, per_node=run.launch.nproc_per_node)
    method = methods.of_config(run.compression) if run.attach else methods.parse(methods.STOCK)
    wire = summary.get("weight_wire") or {}
    bits = wire.get("bits_per_element") if method.exact else None
    if bits:
        job = dataclasses.replace(job, weight_bits=bits)
    flops = solve(job, own, method, seconds)
    processor = dataclasses.replace(cluster.processor, flops=flops)
    return dataclasses.replace(cluster, processor=processor), bits


def solve(job: Job, cluster: Cluster, method: Method, seconds: float) -> float:
    """Operations a second at which a step takes `seconds`."""

    def takes(flops: float) -> float:
        processor = dataclasses.replace(cluster.processor, flops=flops)
        return simulate(job, dataclasses.replace(cluster, processor=processor), method).seconds

    if takes(_MOST) >= seconds:
        raise UserError(
            f"--from: its steps took {seconds:.3g} s, but by these links the exchange and the optimizer "
            f"alone take {takes(_MOST):.3g} s; give the links that it ran on (--cluster, --inter-gbit)"
        )
    low, high = math.log(_LEAST), math.log(_MOST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(math.exp(middle)) > seconds else (low, middle)
        if high - low < 1e-5:
            break
    return math.exp(high)


def job_of(run: RunConfig, name: str) -> Job:
    """The job of a resolved configuration, checked as a dry run checks it. Imports Megatron."""
    return jobs.of_arguments(name, prepare_run(run, Path("runs") / name, dry=True).args)
