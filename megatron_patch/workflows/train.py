"""`megatron-loco train`: one run, from a configuration to a folder of results.

FOLDER/config.yaml     the resolved configuration          FOLDER/metrics.jsonl  a line per logged step
FOLDER/command.txt     the torchrun command                FOLDER/summary.json   written at the end
FOLDER/tensorboard/    Megatron's own and ours             FOLDER/logs/          one file per rank
FOLDER/checkpoints/    where megatron.save_interval asks for them

A run that was ended goes on from its last checkpoint with --resume; launch.max_restarts does so by itself.
--with adds recipes, e.g. of a cluster: --with configs/clusters/slurm.yaml. On several nodes every node runs
this command, with the same FOLDER (shared) and a launch.node_rank of its own; node 0 looks after the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.integration import tracker
from megatron_patch.workflows import checkpoints, configuration, dry_run, launcher, paths
from megatron_patch.workflows.configuration import RunConfig
from megatron_patch.workflows.data_files import check_dataset, load_manifest
from megatron_patch.workflows.progress import Board, StepProgress

_OWN_FILES = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json")
_OWN_FOLDERS = ("tensorboard", "logs", "failures")
_SHARED_SECONDS = 60
"""How long a file that another node has written may take to be seen on a shared file system."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked as far as one can without starting it."""

    run: RunConfig
    job: launcher.Job
    args: argparse.Namespace
    """Megatron's own, parsed and validated."""

    @property
    def steps(self) -> int:
        return self.args.train_iters or 0

    @property
    def folder(self) -> Path:
        return self.job.folder


def prepare_run(run: RunConfig, folder: Path, *, dry: bool = False, cache: Path | None = None) -> PreparedRun:
    """Prepare the data, resolve and check the flags. Imports Megatron (on CPU with its stand-ins).

    With `dry` nothing is written, and neither data nor GPUs nor the other nodes have to be there. `cache` is
    where Megatron keeps the data set's shuffled index, beside the data set if None: it writes without a lock,
    so that runs that begin at the same time with the same seed each need one of their own.

    Raises:
        UserError: whatever of the configuration cannot run.
    """
    if not dry:
        _check_nodes(run.launch)
    script = paths.find(run.launch.script)
    if not script.is_file():
        raise UserError(f"launch.script: {run.launch.script!r}: no such file")
    # A dry run does not mend a torn tracker file.
    step = tracker.latest(checkpoints.checkpoints(folder)) if dry else checkpoints.latest_step(folder)
    for key in ("load", "finetune"):
        if step is not None and run.megatron.get(key):
            raise UserError(
                f"megatron.{key}: {run.megatron[key]!r}: the run in {folder} goes on from checkpoints of its "
                f"own; leave it out: megatron.{key}=null"
            )
    on_cpu = run.launch.device == "cpu"
    if on_cpu:
        from megatron_patch.integration import cpu_device

        cpu_device.install()
    elif dry:  # importing Megatron would warn that there is no GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_patch.workflows import megatron_flags

    parser = megatron_flags.build_parser()
    settings = {**(cpu_device.CPU_FLAGS if on_cpu else {}), **run.megatron}
    # The user's own keys are looked at before minutes go into preparing data.
    megatron_flags.flags_of(settings, parser)
    data = dry_run.data_settings(run) if dry else _data_settings(run)
    settings = {**data, **_folder_settings(run, folder, step, cache), **settings}
    flags = [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
        *("--compression-device", run.launch.device, "--compression-output", str(folder)),
    ]
    job = launcher.Job(run.launch, script, flags, folder)
    with _environment(job.variables()), contextlib.nullcontext() if on_cpu else dry_run.assumed_gpu():
        args = megatron_flags.check(run, flags, parser)
    if on_cpu and not dry:  # it imports transformers: once here, and not in every rank that is forked
        importlib.import_module("megatron.core.tokenizers.text")
    return PreparedRun(run, job, args)


def _check_nodes(launch: configuration.Launch) -> None:
    """What a run needs and a plan does not: GPUs, and the way to the other nodes."""
    if launch.nnodes > 1 and not launch.rdzv_endpoint:
        raise UserError(
            f"launch.nnodes: {launch.nnodes} needs launch.rdzv_endpoint, host:port of the first node "
            "(configs/clusters; --dry-run shows the command without)"
        )
    if launch.nnodes > 1 and str(launch.rdzv_endpoint).partition(":")[0] == "localhost":
        raise UserError(
            f"launch.rdzv_endpoint: {launch.rdzv_endpoint!r} is another machine on each of "
            f"{launch.nnodes} nodes; name the first one (configs/clusters take it from MASTER_ADDR)"
        )
    if launch.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "launch.device: 'cuda', but no GPU is visible here; use --dry-run to look at the command, "
                "launch.device=cpu to run without"
            )
    elif launch.nnodes > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise UserError(
            f"launch.nnodes: {launch.nnodes} with launch.device cpu needs the environment variable "
            "GLOO_SOCKET_IFNAME, the network interface that leads to the other nodes, e.g. eth0"
        )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Within the block the environment that ranks will have: Megatron's validation looks at it."""
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _data_settings(run: RunConfig) -> dict[str, Any]:
    data = run.data
    if data.path is None:
        for item in run.megatron.get("data_path") or []:
            if not _is_number(item):  # Megatron's own form: weights and prefixes in turn
                check_dataset(Path(item))
        return {}
    prefix = Path(data.path)
    if data.source is not None:
        from megatron_patch.workflows.prepare_data import prepare

        source = None if data.source == "stdlib" else Path(data.source)
        manifest = prepare(source, prefix, tokenizer=data.tokenizer, quiet=load_manifest(prefix) is not None)
        return {"data_path": [str(prefix)], **manifest.megatron_flags}
    check_dataset(prefix)
    found = load_manifest(prefix)
    return {"data_path": [str(prefix)], **(found.megatron_flags if found else {})}


def _folder_settings(run: RunConfig, folder: Path, step: int | None, cache: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"tensorboard_dir": str(folder / "tensorboard")}
    if run.megatron.get("save_interval") is not None:
        settings["save"] = str(checkpoints.checkpoints(folder))
    if "save" in settings or step is not None:
        settings["load"] = str(checkpoints.checkpoints(folder))
    if run.data.path is not None:
        settings["data_cache_path"] = str(cache or f"{run.data.path}-cache")
    return settings


def _is_number(item: object) -> bool:
    try:
        float(str(item))
    except ValueError:
        return False
    return True


def check_folder(folder: Path, overwrite: bool, resume: bool = False) -> None:
    """Look whether a run may start in `folder`, or go on there.

    Raises:
        UserError: it holds a run already, and neither `overwrite` nor `resume` was asked for; it holds
            checkpoints, which only `resume` may use; or it holds none to resume from.
    """
    step = checkpoints.latest_step(folder)
    if resume and step is None:
        raise UserError(
            f"resume: {folder} holds no checkpoint to go on from; start anew (--overwrite replaces a run), "
            "with megatron.save_interval=STEPS to have checkpoints written"
        )
    if step is not None and not resume:
        raise UserError(
            f"out: {folder} holds a run with checkpoints; add --resume to `megatron-loco train` to go on "
            f"from step {step}, choose another folder, or remove {checkpoints.checkpoints(folder)} for a new "
            "start"
        )
    if (folder / "config.yaml").exists() and not overwrite and not resume:
        raise UserError(f"out: {folder} holds a run already; choose another folder or add --overwrite")


def claim_folder(folder: Path, overwrite: bool, resume: bool = False) -> None:
    """Make `folder` ready for a new run, or for one to go on with its metrics, logs and TensorBoard files.

    Raises:
        UserError: as `check_folder` does, or the folder cannot be written.
    """
    check_folder(folder, overwrite, resume)
    files, folders = (("summary.json",), ("failures",)) if resume else (_OWN_FILES, _OWN_FOLDERS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            (folder / name).unlink(missing_ok=True)
        for name in folders:
            shutil.rmtree(folder / name, ignore_errors=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error


def execute(
    prepared: PreparedRun,
    label: str,
    overwrite: bool = False,
    resume: bool = False,
    board: Board | None = None,
) -> dict[str, Any]:
    """Run to the end with a live progress line, from the last checkpoint if `resume`; returns summary.json.

    The line is one of `board`'s where the run is one of several.

    Raises:
        launcher.RankFailed: a rank failed; what it wrote is in FOLDER/logs.
        UserError: a mistake of the user's that only a rank could find.
    """
    folder, first = prepared.folder, prepared.run.launch.node_rank == 0
    if first:
        claim_folder(folder, overwrite, resume)
        (folder / "config.yaml").write_text(prepared.run.as_yaml(), encoding="utf-8")
        (folder / "command.txt").write_text(prepared.job.command_text(), encoding="utf-8")
    done = checkpoints.latest_step(folder) or 0
    try:
        with StepProgress(label, prepared.steps, folder / "metrics.jsonl", done, board) as progress:
            stopped = launcher.start(prepared.job, progress.tick, progress.say)
    except launcher.Stopped as error:
        raise _stopped(prepared, str(error)) from error
    written = folder / "summary.json"
    deadline = time.monotonic() + (_SHARED_SECONDS if first and prepared.run.launch.nnodes > 1 else 0)
    while not written.exists() and not stopped and time.monotonic() < deadline:
        time.sleep(1)
    if not written.exists() and first and not stopped:  # e.g. megatron.exit_interval
        raise launcher.RankFailed(
            f"the run left no summary: Megatron ended before it did (see {prepared.job.logs})"
        )
    # Other nodes have one where the folder is shared, and the last rank may still be writing it.
    summary: dict[str, Any] = {"steps": 0, "train_loss": None, "valid_loss": None}
    if written.exists():
        summary = json.loads(written.read_text(encoding="utf-8"))
    if stopped and summary["steps"] < prepared.steps:
        raise _stopped(prepared, f"stopped by {stopped}")
    return summary


def go_on(prepared: PreparedRun, label: str, board: Board | None = None) -> dict[str, Any]:
    """`execute` a run that was interrupted, or not begun: from its last checkpoint if there is one."""
    resume = checkpoints.latest_step(prepared.folder) is not None
    return execute(prepared, label, overwrite=not resume, resume=resume, board=board)


def _stopped(prepared: PreparedRun, why: str) -> launcher.Stopped:
    step = checkpoints.latest_step(prepared.folder)
    if step is None:
        return launcher.Stopped(
            f"{why} before a checkpoint was written (megatron.save_interval, megatron.exit_signal_handler)"
        )
    return launcher.Stopped(f"{why}; --resume goes on from the checkpoint of step {step}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco train`."""
    add_run_arguments(parser).add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of the run in that folder"
    )
    parser.add_argument(
        "--with",
        dest="and_files",
        action="append",
        default=[],
        metavar="FILE",
        help="another recipe over CONFIG, e.g. configs/methods/none.yaml; may be repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the torchrun command and the resolved configuration; start and write nothing",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add what `train` and `compare` share; returns the group of what may be done with a folder in use."""
    parser.add_argument(
        "config", type=str, metavar="CONFIG", help="a YAML file, e.g. configs/models/llama_tiny.yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. megatron.lr=1e-3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/CONFIG)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--overwrite", action="store_true", help="replace the results of a run in that folder")
    return group


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """The command line's way in; returns the exit status."""
    path = paths.find(args.config)
    extra = [paths.find(name) for name in args.and_files]
    configured = configuration.load(path, args.overrides, and_files=extra)
    folder = args.out or Path("runs") / path.stem
    if args.dry_run:
        planned = prepare_run(configured, folder, dry=True)
        say(dry_run.shown(configured, planned.job))
        return 0
    if configured.launch.node_rank == 0:
        check_folder(folder, args.overwrite, args.resume)  # before Megatron is imported
    summary = execute(prepare_run(configured, folder), path.stem, args.overwrite, args.resume)
    if configured.launch.node_rank:
        say(f"node {configured.launch.node_rank} has ended; see {folder}")
    else:
        say(f"validation loss {summary['valid_loss']}, training loss {summary['train_loss']}; see {folder}")
    return 0
