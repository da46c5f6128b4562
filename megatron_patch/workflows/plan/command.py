"""`megatron-loco plan`: what a recipe would gain on a cluster, and which setting to take. Nothing is run.

    megatron-loco plan configs/models/llama2_7b.yaml --nodes 2 --inter-gbit 100 megatron.global_batch_size=128
    megatron-loco plan RECIPE --cluster links.yaml --from runs/baseline --out runs/plan

A step is simulated from the recipe's own flags, for Megatron's exchange and for this package's. Links come
from options, from a file (--cluster; `bench links` measures one) or from data sheets, the compute rate from
a GPU's peak and --mfu, or from a run that was made (--from). --explain shows every number and its source;
docs/plan.md says how far the predictions were from measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_patch.errors import UserError
from megatron_patch.files import output_folder, write_whole
from megatron_patch.workflows.plan import cluster_file, constants, methods, recommend, show, torch_step
from megatron_patch.workflows.plan import job as jobs
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import MEGATRON, STRATEGIES, Job
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import RunConfig
from megatron_patch.workflows.run.prepare import prepare_run
from megatron_patch.workflows.run_reader import read_summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco plan`."""
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="YAML files, and section.key=value overrides of them"
    )
    parser.add_argument(
        "--with",
        dest="and_files",
        action="append",
        default=[],
        metavar="FILE",
        help="another recipe over each",
    )
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="the cluster's numbers (bench links writes one)"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="default: the recipe's launch.nnodes")
    parser.add_argument("--gpus-per-node", type=int, metavar="G", help="default: launch.nproc_per_node")
    parser.add_argument(
        "--inter-gbit", type=float, metavar="B",
        help=f"of a whole node to the others, each way; default {cluster_file.DEFAULT_INTER_GBIT:g}",
    )  # fmt: skip
    parser.add_argument(
        "--intra-gbyte",
        type=float,
        metavar="S",
        help="of a GPU inside its node, each way; default: the GPU's link",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"{', '.join(constants.GPUS)}; default {cluster_file.DEFAULT_GPU}"
    )
    parser.add_argument("--mfu", type=float, metavar="F", help="useful share of the GPU's peak; default 0.4")
    parser.add_argument(
        "--compress-rate", type=float, metavar="R", help="elements a second to compress (bench kernels)"
    )
    parser.add_argument(
        "--weight-bits", type=float, metavar="P", help="of the exact gather; default: by learning rate"
    )
    parser.add_argument(
        "--from",
        dest="run_folder",
        type=Path,
        metavar="RUN",
        help="take the compute rate of a run that was made",
    )
    parser.add_argument(
        "--methods", metavar="A,B", help=f"default {','.join(methods.DEFAULT)}; see docs/plan.md for others"
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=MEGATRON,
        help="megatron: its DDP; optim_grads: Megatron-FSDP; PyTorch's fsdp2, hybrid (FSDP2 in nodes), ddp",
    )
    parser.add_argument(
        "--worth", type=float, default=constants.value("worth"), metavar="F",
        help="least gain that changes a recommendation; default 0.03",
    )  # fmt: skip
    parser.add_argument(
        "--scale", action="store_true", help="8 to 4,096 GPUs instead, strong and weak scaling"
    )
    parser.add_argument("--explain", action="store_true", help="every number of the model, with its source")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plan.json and plan.png here")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    paths = [item for item in args.recipes if "=" not in item]
    overrides = [item for item in args.recipes if "=" in item] + args.overrides
    if args.scale and args.strategy != MEGATRON:
        raise UserError("--scale: shows Megatron's DDP only; leave out --strategy")
    if not paths:
        raise UserError("plan: name a recipe, e.g. configs/models/llama2_7b.yaml")
    settings = _settings(args)
    if len(paths) > 1 and (args.json or args.out) and not args.scale:
        raise UserError("--out and --json: write one plan; name a single recipe, or add --scale")
    extra = [configuration.find(name) for name in args.and_files]
    console = Console(width=None if Console().is_terminal else 150)
    plans = []
    for name in paths:
        path = configuration.find(name)
        given = configuration.load(path, overrides, and_files=extra)
        if args.scale:
            plans.append(_grow(console, args, settings, path.stem, given))
        else:
            plans.append(_plan(console, args, settings, path.stem, given))
    _write(args, plans)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the cluster: those of the file, overridden by options."""
    for name in ("nodes", "gpus_per_node", "inter_gbit", "intra_gbyte", "compress_rate", "weight_bits"):
        given = getattr(args, name)
        if given is not None and not 0 < given < math.inf:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: {given:g} is not allowed; it must be above 0")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(f"--mfu: {args.mfu:g} is not allowed; it must be above 0 and at most 1")
    if args.weight_bits is not None and args.weight_bits > 16:
        raise UserError(f"--weight-bits: {args.weight_bits:g} is not allowed; it must be at most 16")
    if not 0 <= args.worth < 1:
        raise UserError(f"--worth: {args.worth:g} is not allowed; it must be 0 or more and below 1")
    settings = cluster_file.read(args.cluster) if args.cluster else {}
    for name in ("nodes", "gpus_per_node", "inter_gbit", "intra_gbyte", "compress_rate", "mfu", "gpu"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    return settings


def prepared(
    args: argparse.Namespace, settings: dict[str, Any], name: str, given: RunConfig
) -> tuple[Job, Cluster]:
    """Return the job of a recipe, which Megatron has validated for the cluster's ranks, and the cluster."""
    cluster = cluster_file.build(
        settings, given.launch.nnodes, given.launch.nproc_per_node, str(args.cluster or "")
    )
    launch = dataclasses.replace(
        given.launch, nnodes=cluster.nodes, nproc_per_node=cluster.per_node, node_rank=0
    )
    job = job_of(dataclasses.replace(given, launch=launch), name)
    if args.run_folder is not None:
        cluster, bits = calibrated(cluster, args.run_folder)
        job = dataclasses.replace(job, weight_bits=bits)
    if math.isnan(cluster.processor.flops):
        raise UserError(
            "--cluster: its ranks compute on CPUs, whose rate is not known: add --from RUN, a run that was "
            "made there, or --gpu NAME"
        )
    if args.weight_bits is not None:
        job = dataclasses.replace(job, weight_bits=args.weight_bits)
    return torch_step.planned_with(job, args.strategy), cluster


def _plan(
    console: Console, args: argparse.Namespace, settings: dict[str, Any], name: str, given: RunConfig
) -> dict[str, Any]:
    job, cluster = prepared(args, settings, name, given)
    chosen = choose(job, cluster, args.methods)
    found = recommend.rows(job, cluster, chosen)
    curves: dict[str, list[float]] = {}
    if cluster.nodes > 1:
        curves = recommend.curves(job, cluster, chosen)
        stock = curves[chosen[0].name]
        found = [
            row if row.method is chosen[0] else dataclasses.replace(
                row, pays_below=recommend.pays_below(stock, curves[row.method.name], args.worth)
            )
            for row in found
        ]  # fmt: skip
    advice = recommend.advise(job, cluster, found, args.worth)
    gpu = constants.find(settings.get("gpu") or cluster_file.gpu_of(settings.get("device")))
    label = "ranks" if settings.get("device") == "cpu" else gpu.name
    console.print(show.title(job, cluster, label), highlight=False, soft_wrap=True)
    console.print(show.table(found, advice.row))
    console.print(f"\n{advice.reason}", highlight=False, soft_wrap=True)
    if not advice.stays and advice.row.method.options:
        console.print(f"  {advice.row.method.options}", highlight=False, soft_wrap=True)
    for row in found:
        if row.method.outer_interval > 1:
            console.print(show.outer_steps(row, cluster), highlight=False, soft_wrap=True)
    console.print(show.source_of(gpu), highlight=False, soft_wrap=True)
    if args.explain:
        for table in show.explanation(job, cluster, gpu):
            console.print()
            console.print(table)
    return show.as_json(job, cluster, gpu, found, advice, curves)


def choose(job: Job, cluster: Cluster, names: str | None) -> Sequence[methods.Method]:
    """Return the methods to plan for a job; `names` are those of `--methods`."""
    if job.strategy != MEGATRON:
        return torch_step.methods_of(names, job)
    groups = [job.group(cluster, expert) for expert in (False, True)]
    hops = any(group.nodes > 1 and group.local > 1 for group in groups[: 2 if job.expert > 1 else 1])
    gathers = job.distributed and job.weight_bytes == 2
    one_precision = job.gradient_bytes == 2 or job.weight_bytes == 4
    return methods.chosen(names, one_precision, hops, gathers)


def _grow(
    console: Console, args: argparse.Namespace, settings: dict[str, Any], name: str, given: RunConfig
) -> dict[str, Any]:
    home = given.launch.world_size
    job, cluster = prepared(args, {**settings, "nodes": given.launch.nnodes}, name, given)
    found = list(recommend.grow(job, cluster, home))
    console.print(recommend.scaling_table(name, found))
    console.print()
    return {"recipe": name, "scaling": [dataclasses.asdict(point) for point in found]}


def _write(args: argparse.Namespace, plans: Sequence[dict[str, Any]]) -> None:
    content = plans if args.scale else plans[0]
    text = json.dumps(content, indent=2) + "\n"
    files = [args.json] if args.json else []
    if args.json:
        output_folder(args.json.parent, "--json")
    if args.out:
        output_folder(args.out)
        files.append(args.out / "plan.json")
        if not args.scale and plans[0]["curves"]:
            show.draw(args.out / "plan.png", plans[0])
    for path in files:
        write_whole(path, text)


_LEAST, _MOST = 1e6, 1e18
_HALVINGS = 60


def calibrated(cluster: Cluster, folder: Path) -> tuple[Cluster, float | None]:
    """Return `cluster` with the compute rate that explains a run's measured step, and its weight bits.

    The run's step is simulated over the links of `cluster`, with the run's own nodes and ranks.
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
    """Return the operations per second at which a step takes `seconds`."""

    def takes(flops: float) -> float:
        processor = dataclasses.replace(cluster.processor, flops=flops)
        return recommend.simulate(job, dataclasses.replace(cluster, processor=processor), method).seconds

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
    """Return the job of a resolved configuration, checked as in a dry run. This imports Megatron."""
    return jobs.of_arguments(name, prepare_run(run, Path("runs") / name, dry=True).args)
