"""`megatron-loco plan`: what a recipe would gain on a cluster, and which setting to take. Nothing is run.

    megatron-loco plan configs/models/llama2_7b.yaml --nodes 2 --inter-gbit 100 megatron.global_batch_size=128
    megatron-loco plan RECIPE --nodes 4 --inter-gbit 100 --json plan.json
    megatron-loco plan --inter-gbit 100 -- torchrun --nnodes 4 pretrain_gpt.py --num-layers 32 ...
    megatron-loco plan train.sh --inter-gbit 100 -- --vocab-size 128256

A recipe, a training script's command line, or a shell script with one; flags after -- replace the shell
script's, and it is not executed. A step is simulated from the job's own flags, for Megatron's exchange and
for this package's. Links come from options or from data sheets, the compute rate from a GPU's peak and --mfu;
--json has every number with its source. docs/plan.md says how far the predictions were from measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_patch.errors import UserError
from megatron_patch.files import output_file, write_whole
from megatron_patch.workflows import tables
from megatron_patch.workflows.plan import constants, methods, recommend, torch_step
from megatron_patch.workflows.plan import job as jobs
from megatron_patch.workflows.plan.cluster import DEFAULT_GPU, DEFAULT_INTER_GBIT, Cluster, of_gpus
from megatron_patch.workflows.plan.job import MEGATRON, STRATEGIES, Job
from megatron_patch.workflows.plan.recommend import Advice, Row
from megatron_patch.workflows.run import command_line, configuration
from megatron_patch.workflows.run.command_line import CommandLine
from megatron_patch.workflows.run.configuration import RunConfig
from megatron_patch.workflows.run.job import FSDPS, Launch
from megatron_patch.workflows.run.prepare import environment, prepare_run

_NUMBERS = {
    "--nodes": (int, "N", "default: the recipe's launch.nnodes"),
    "--gpus-per-node": (int, "G", "default: launch.nproc_per_node"),
    "--inter-gbit": (float, "B", f"of a node to the others, each way; default {DEFAULT_INTER_GBIT:g}"),
    "--intra-gbyte": (float, "S", "of a GPU inside its node, each way; default: the GPU's link"),
    "--mfu": (float, "F", f"useful share of the GPU's peak; default {constants.value('mfu'):g}"),
    "--weight-bits": (float, "P", "of the exact gather; default: by learning rate"),
}
_SHELL_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_MOST = {"--mfu": 1.0, "--weight-bits": 16.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco plan`."""
    add = parser.add_argument
    add(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="a YAML file, e.g. configs/models/llama2_7b.yaml, or a .sh",
    )
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. megatron.lr=1e-3")
    add("--with", dest="and_files", action="append", default=[], metavar="FILE", help="goes over the recipe")
    for option, (kind, name, text) in _NUMBERS.items():
        add(option, type=kind, metavar=name, help=text)
    gpus = ", ".join(constants.GPUS)
    add("--gpu", metavar="NAME", default=DEFAULT_GPU, help=f"{gpus}; default {DEFAULT_GPU}")
    usual = ",".join(methods.DEFAULT)
    add("--methods", metavar="A,B", help=f"default {usual}; see docs/plan.md for others")
    add(
        "--strategy",
        choices=STRATEGIES,
        default=MEGATRON,
        help="megatron: its DDP; optim_grads: Megatron-FSDP; PyTorch's fsdp2, hybrid (FSDP2 in nodes), ddp",
    )
    worth = constants.value("worth")
    text = f"least gain that changes a recommendation; default {worth:g}"
    add("--worth", type=float, default=worth, metavar="F", help=text)
    add("--json", type=Path, metavar="FILE", help="write the plan here")


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    _check(args)
    if args.json:
        output_file(args.json)
    words, recipe = args.command_line, args.recipe
    if not words and recipe is None:
        raise UserError("plan needs a recipe, a shell script, or -- pretrain_gpt.py FLAGS (see plan --help)")
    if (words and recipe is None) or Path(recipe).suffix in _SHELL_SCRIPTS:
        if args.overrides or args.and_files:
            raise UserError(
                f"{[*args.overrides, *args.and_files][0]}: goes over a recipe; write -- --flag VALUE"
            )
        command = command_line.of_script(Path(recipe), words) if recipe else command_line.of_words(words)
        launch = command.launch(args.nodes, args.gpus_per_node)
        plan = _plan(args, launch, lambda launch: job_of_command(command, launch), command_line.as_flags)
    else:
        path, extra = configuration.find(recipe), [configuration.find(name) for name in args.and_files]
        run = configuration.load(path, [*args.overrides, *words], and_files=extra)
        plan = _plan(
            args, run.launch, lambda launch: job_of(dataclasses.replace(run, launch=launch), path.stem)
        )
    if args.json:
        write_whole(args.json, json.dumps(plan, indent=2) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    for option in _NUMBERS:
        given, most = getattr(args, option[2:].replace("-", "_")), _MOST.get(option, math.inf)
        if given is not None and not (0 < given <= most and given < math.inf):
            at_most = "" if math.isinf(most) else f" and at most {most:g}"
            raise UserError(f"{option}: {given:g} is not allowed; it must be above 0{at_most}")
    if not 0 <= args.worth < 1:
        raise UserError(f"--worth: {args.worth:g} is not allowed; it must be 0 or more and below 1")


def _plan(
    args: argparse.Namespace,
    given: Launch,
    make: Callable[[Launch], Job],
    shown: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Print the plan of the job that `make` makes, its options as `shown`; return what `--json` writes."""
    gpu = constants.find(args.gpu)
    nodes = args.nodes or given.nnodes
    per_node = args.gpus_per_node or given.nproc_per_node
    links = (args.inter_gbit, args.intra_gbyte)
    cluster = of_gpus(gpu, nodes, per_node, *links, args.mfu)
    job = make(dataclasses.replace(given, nnodes=nodes, nproc_per_node=per_node, node_rank=0))
    if args.weight_bits is not None:
        job = dataclasses.replace(job, weight_bits=args.weight_bits)
    job = torch_step.planned_with(job, args.strategy)
    chosen = _choose(job, cluster, args.methods)
    rows = recommend.rows(job, cluster, chosen)
    if cluster.nodes > 1:
        stock, *others = recommend.curves(job, cluster, chosen)
        below = [None, *(recommend.pays_below(stock, other, args.worth) for other in others)]
        rows = [dataclasses.replace(row, pays_below=b) for row, b in zip(rows, below, strict=True)]
    advice = recommend.advise(job, cluster, rows, args.worth)
    lines = [f"\n{advice.reason}"]
    if not advice.stays and advice.row.method.options:
        lines.append(f"  {shown(advice.row.method.options)}")
    console = Console(width=None if Console().is_terminal else 150)
    console.print(_title(job, cluster, gpu.name), highlight=False, soft_wrap=True)
    console.print(_table(rows, advice.row))
    for line in [*lines, _source_of(gpu)]:
        console.print(line, highlight=False, soft_wrap=True)
    return as_json(job, cluster, gpu, rows, advice)


def job_of(run: RunConfig, name: str) -> Job:
    """Return the job of a resolved configuration, checked as in a dry run. This imports Megatron."""
    if run.compression.outer_steps:
        raise UserError("compression.outer_interval: the plan does not know outer steps; plan with 1")
    return jobs.of_arguments(name, prepare_run(run, Path("runs") / name, dry=True).args)


def job_of_command(command: CommandLine, launch: Launch) -> Job:
    """Return the job of a training script's command line. This imports Megatron."""
    connections = "8" if FSDPS & set(command.flags) else "1"  # Megatron's validation asserts it.
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    with environment(needed), command_line.in_flags(command):
        args = command_line.check(command, launch.world_size)
        if args.compression_outer_interval > 1:
            raise UserError("compression.outer_interval: the plan does not know outer steps; plan with 1")
        return jobs.of_arguments(command.name, args)


def _choose(job: Job, cluster: Cluster, names: str | None) -> Sequence[methods.Method]:
    """Return the methods to plan for a job; `names` are those of `--methods`."""
    if job.strategy != MEGATRON:
        return torch_step.methods_of(names, job)
    groups = [job.group(cluster, expert) for expert in (False, True)]
    hops = any(group.nodes > 1 and group.local > 1 for group in groups[: 2 if job.expert > 1 else 1])
    gathers = job.distributed and job.weight_bytes == 2
    one_precision = job.gradient_bytes == 2 or job.weight_bytes == 4
    return methods.chosen(names, one_precision, hops, gathers)


# --- what is shown ----------------------------------------------------------------------------------------


def _title(job: Job, cluster: Cluster, gpu: str) -> str:
    """Return one line on the job, the cluster and the layout that are planned."""
    links = f"{cluster.nodes} x {cluster.per_node} {gpu}"
    if cluster.nodes > 1:
        links += f", {8 * cluster.between.bandwidth / 1e9:.4g} Gbit/s usable between nodes"
    replicas = job.replicas(cluster.world)
    split = f"TP {job.tensor}, PP {job.pipeline}, CP {job.context}, EP {job.expert}, DP {replicas}"
    if job.strategy != MEGATRON:
        split = f"{job.strategy} over {replicas} ranks"
    return (
        f"{job.name}: {links}; {split}; "
        f"{recommend.microbatches(job, cluster)} of {job.micro_batch} x {job.sequence} tokens; "
        f"{8 * job.gradient_bytes}-bit gradients, {8 * job.weight_bytes}-bit weights"
    )


def _table(rows: Sequence[Row], best: Row) -> Table:
    """Return the table of methods, in which `best` is marked."""
    columns = ("method", "step (s)", "speed-up", "tokens/s", "exposed (s)", "GB a node sends", "GB of memory")
    cells = [
        (
            ("> " if row is best else "  ") + row.method.name,
            f"{row.seconds:.3f}",
            f"{row.speedup:.2f} x",
            f"{row.tokens_per_second:,.0f}",
            f"{row.step.exposed:.3f}",
            f"{row.step.uplink_bytes / 1e9:.3f}",
            f"{row.added_bytes / 1e9:+.1f}",
            _below(row.pays_below),
        )
        for row in rows
    ]
    shown = tables.terminal((*columns, "pays below"), cells, left=("method",))
    shown.columns[0].no_wrap = True
    return shown


def _below(gbit: float | None) -> str:
    """Format a break-even bandwidth of a row (Row.pays_below)."""
    if gbit is None:
        return "-"
    if gbit == 0:
        return "never"
    return "always" if math.isinf(gbit) else f"{gbit:.3g} Gbit/s"


def _source_of(gpu: constants.Gpu) -> str:
    """Return the line below the table: what its numbers are."""
    kinds = [constants.numbers_of(gpu)[name].kind for name in constants.RATES]
    kernels = f"; {kinds.count('measured')} of {len(kinds)} kernels' rates were measured on this GPU"
    return f"Predicted, not measured{kernels if 'measured' in kinds else ''}."


def as_json(
    job: Job, cluster: Cluster, gpu: constants.Gpu, rows: Sequence[Row], advice: Advice
) -> dict[str, Any]:
    """Return the content that `--json` writes."""
    return {
        "recipe": job.name,
        "strategy": job.strategy,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "inter_bytes_per_second": cluster.between.bandwidth,
        "intra_bytes_per_second": cluster.inside.bandwidth,
        "microbatches": job.microbatches(cluster.world),
        "data_parallel_ranks": job.replicas(cluster.world),
        "weight_bits": job.bits_of_weights,
        "methods": [_row(row) for row in rows],
        "recommended": advice.row.method.name,
        "options": advice.row.method.options,
        "reason": advice.reason,
        "stay_with_stock": advice.stays,
        "constants": {name: dataclasses.asdict(number) for name, number in constants.numbers_of(gpu).items()},
    }


def _row(row: Row) -> dict[str, Any]:
    always = row.pays_below is not None and math.isinf(row.pays_below)
    return {
        "name": row.method.name,
        "options": row.method.options,
        "step_seconds": row.seconds,
        "speedup": row.speedup,
        "tokens_per_second": row.tokens_per_second,
        "exposed_seconds": row.step.exposed,
        "node_uplink_bytes": row.step.uplink_bytes,
        "rank_bytes": dataclasses.asdict(max(row.step.sent, key=lambda sent: sent.uplink)),
        "added_memory_bytes": row.added_bytes,
        "pays_below_gbit": None if always else row.pays_below,
        "pays_always": always,
    }
