"""`megatron-loco train`: one run, from a configuration to a folder of results.

FOLDER/config.yaml     the resolved configuration          FOLDER/metrics.jsonl  a line per logged step
FOLDER/command.txt     the torchrun command                FOLDER/summary.json   written at the end
FOLDER/tensorboard/    Megatron's own and ours             FOLDER/logs/          one file per rank
FOLDER/checkpoints/    where megatron.save_interval asks for them

A run that was ended resumes from its last checkpoint with --resume; launch.max_restarts does so by itself.
--with adds recipes, e.g. of a cluster: --with configs/clusters/slurm.yaml. On several nodes every node runs
this command, with the same FOLDER (shared) and a launch.node_rank of its own; node 0 looks after the folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_patch.workflows.plan import hint
from megatron_patch.workflows.run import checkpoints, configuration, dry_run, launcher, recipes, run_folder
from megatron_patch.workflows.run.prepare import PreparedRun, prepare_run
from megatron_patch.workflows.run.progress import Board, StepProgress

_SHARED_SECONDS = 60
"""How long a file that another node has written may take to be seen on a shared file system."""


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
        run_folder.claim_folder(folder, overwrite, resume)
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
    return launcher.Stopped(f"{why}; --resume starts from the checkpoint of step {step}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco train`."""
    add_run_arguments(parser).add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint of the run in that folder"
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
    path = recipes.find(args.config)
    extra = [recipes.find(name) for name in args.and_files]
    configured = configuration.load(path, args.overrides, and_files=extra)
    folder = args.out or Path("runs") / path.stem
    if args.dry_run:
        planned = prepare_run(configured, folder, dry=True)
        said = hint.line(configured, planned.args, args.config)
        say(dry_run.shown(configured, planned.job, [said] if said else []))
        return 0
    if configured.launch.node_rank == 0:
        run_folder.check_folder(folder, args.overwrite, args.resume)  # before Megatron is imported
    prepared = prepare_run(configured, folder)
    if configured.launch.node_rank == 0 and (said := hint.line(configured, prepared.args, args.config)):
        say(said)
    summary = execute(prepared, path.stem, args.overwrite, args.resume)
    if configured.launch.node_rank:
        say(f"node {configured.launch.node_rank} has ended; see {folder}")
    else:
        say(f"validation loss {summary['valid_loss']}, training loss {summary['train_loss']}; see {folder}")
    return 0
