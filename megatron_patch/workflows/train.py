"""`megatron-loco train`: one run, from a configuration to a folder of results.

FOLDER/config.yaml     the resolved configuration          FOLDER/metrics.jsonl  a line per logged step
FOLDER/command.txt     the torchrun command                FOLDER/summary.json   written at the end
FOLDER/tensorboard/    Megatron's own and ours             FOLDER/logs/          one file per rank
FOLDER/checkpoints/    where megatron.save_interval asks for them

A run that was ended resumes from its last checkpoint with --resume; launch.max_restarts does so by itself.
A scheduler that gives the same command again gives it --resume-or-start, which needs megatron.save_interval.
megatron.save puts the checkpoints elsewhere; they are looked for there, too.
--with adds recipes, e.g. of a cluster: --with configs/clusters/slurm.yaml. On several nodes every node runs
this command, with the same FOLDER (shared) and a launch.node_rank of its own; node 0 looks after the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_patch import registry
from megatron_patch.errors import RankFailed, UserError
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows import run_reader
from megatron_patch.workflows.run import configuration, launcher, prepare, run_folder
from megatron_patch.workflows.run.configuration import RunConfig
from megatron_patch.workflows.run.prepare import PreparedRun, prepare_run
from megatron_patch.workflows.run.progress import StepProgress
from megatron_patch.workflows.run.run_folder import latest_step, place

_SHARED_SECONDS = 60
"""The longest time until a file that another node has written is visible on a shared file system."""
_DYING_SECONDS = 120
"""How long a repeated job waits for the end of its predecessor, whose node may be lost."""


def execute(
    prepared: PreparedRun,
    label: str,
    overwrite: bool = False,
    resume: bool = False,
    *,
    one_of_many: bool = False,
) -> dict[str, Any]:
    """Run to the end with a live progress line, from the last checkpoint if `resume`; return summary.json.

    `one_of_many` runs show it on a terminal alone.

    Raises:
        RankFailed: a rank failed; its output is in FOLDER/logs.
        UserError: a rank found a mistake of the user's.
    """
    run, folder = prepared.run, prepared.folder
    if run.launch.node_rank:
        return _finish(prepared, _start(prepared, label, one_of_many), 0)
    with _held(run, folder):
        run_folder.check_folder(folder, prepared.checkpoints, overwrite, resume)
        files = {"config.yaml": run.as_yaml(), "command.txt": prepared.job.command_text()}
        run_folder.begin(folder, files, resume=resume)
        return _finish(
            prepared, _start(prepared, label, one_of_many), _SHARED_SECONDS if run.launch.nnodes > 1 else 0
        )


@contextlib.contextmanager
def _held(run: RunConfig, folder: Path, wait: float = 0, create: bool = True) -> Iterator[None]:
    """Lock the run's folder, and the folder of megatron.save.

    Without `create` only existing folders are locked: no other process works in a missing folder, and a
    mistake of the user's then leaves no new folder behind.
    """
    places = {"out": folder} | ({"megatron.save": place(run, folder)} if run.megatron.get("save") else {})
    with contextlib.ExitStack() as held:
        for option, path in places.items():
            if create or path.is_dir():
                held.enter_context(run_folder.only_one(path, "train", wait, option))
        yield


def _start(prepared: PreparedRun, label: str, one_of_many: bool) -> str | None:
    """Run the ranks to their end, and return the name of the signal that stopped them, if one did."""
    metrics, done = prepared.folder / "metrics.jsonl", tracker.latest(prepared.checkpoints) or 0
    try:
        with StepProgress(label, prepared.steps, metrics, done, one_of_many=one_of_many) as progress:
            return launcher.start(prepared.job, progress.tick, progress.say)
    except launcher.Stopped as error:
        raise _stopped(prepared, str(error)) from error


def _finish(prepared: PreparedRun, stopped: str | None, patience: float) -> dict[str, Any]:
    """Return summary.json when this node's ranks have ended; another node may still be writing it."""
    written, first = prepared.folder / "summary.json", prepared.run.launch.node_rank == 0
    deadline = time.monotonic() + patience
    while not written.exists() and not stopped and time.monotonic() < deadline:
        time.sleep(1)
    if not written.exists() and first and not stopped:  # One cause is megatron.exit_interval.
        raise RankFailed(f"the run left no summary: Megatron ended before it did (see {prepared.job.logs})")
    # Nodes other than the first have a summary only if the folder is shared.
    summary: dict[str, Any] = {"steps": 0, "train_loss": None, "valid_loss": None}
    if written.exists():
        summary = json.loads(written.read_text(encoding="utf-8"))
    if stopped and summary["steps"] < prepared.steps:
        raise _stopped(prepared, f"stopped by {stopped}")
    return summary


def resume_or_start(prepared: PreparedRun, label: str, *, one_of_many: bool = False) -> dict[str, Any]:
    """Execute a run that was interrupted or never started, from its last checkpoint if there is one."""
    with _held(prepared.run, prepared.folder):
        resume = latest_step(prepared.checkpoints) is not None
        return execute(prepared, label, overwrite=not resume, resume=resume, one_of_many=one_of_many)


def _stopped(prepared: PreparedRun, why: str) -> launcher.Stopped:
    step = tracker.latest(prepared.checkpoints)
    if step is None:
        return launcher.Stopped(
            f"{why} before a checkpoint was written (megatron.save_interval, megatron.exit_signal_handler)"
        )
    return launcher.Stopped(f"{why}; --resume starts from the checkpoint of step {step}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco train`."""
    group = add_run_arguments(parser)
    group.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint of the run in that folder"
    )
    group.add_argument(
        "--resume-or-start",
        action="store_true",
        help="for schedulers, which repeat the command: resume, or start where there is no checkpoint",
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
    """Add the arguments that `train` and `compare` share; return the exclusive group of --overwrite."""
    parser.add_argument(
        "config", type=str, metavar="CONFIG", help="a YAML file, e.g. configs/models/llama_tiny.yaml"
    )
    add_overrides(parser, "e.g. megatron.lr=1e-3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/CONFIG)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--overwrite", action="store_true", help="replace the results of a run in that folder")
    return group


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the arguments that `overrides` reads."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=help)
    own = "a file that registers your codec or exchange (launch.imports); may be repeated"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE.py", help=own)


def overrides(args: argparse.Namespace) -> list[str]:
    """Import the files of --import, and return the overrides of a command line, with these among them."""
    for file in args.imports:
        registry.import_file(Path(file).absolute())
    return args.overrides + ([f"launch.imports={json.dumps(args.imports)}"] if args.imports else [])


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Run the command, and return the exit status."""
    path = configuration.find(args.config)
    extra = [configuration.find(name) for name in args.and_files]
    configured = configuration.load(path, overrides(args), and_files=extra, importing=not args.dry_run)
    folder = args.out or Path("runs") / path.stem
    first = configured.launch.node_rank == 0
    if args.resume_or_start:
        _check_restartable(configured, folder)
    if args.dry_run:
        prepare.check_stated_data(configured, args.overrides)
        planned = prepare_run(configured, folder, dry=True)
        say(prepare.shown(configured, planned.job))
        return 0
    with contextlib.ExitStack() as held:
        if first:
            patience = _DYING_SECONDS if args.resume_or_start else 0
            held.enter_context(_held(configured, folder, patience, create=False))
        overwrite, resume = args.overwrite, args.resume
        if first:
            if args.resume_or_start:
                resume = latest_step(place(configured, folder)) is not None
                # A run that was stopped before its first checkpoint is run again; one that ended is kept.
                overwrite = not resume and run_folder.summary(folder) is None
            # The folder is checked before Megatron is imported, which takes seconds.
            run_folder.check_folder(folder, place(configured, folder), overwrite, resume)
        prepared = prepare_run(configured, folder)
        summary = execute(prepared, path.stem, overwrite, resume)
    if first:
        losses = (
            f"no {name} loss" if loss is None else f"{name} loss {loss:.4f}"
            for name, loss in (("validation", summary["valid_loss"]), ("training", summary["train_loss"]))
        )
        say(f"{', '.join(losses)}; see {folder}")
        if configured.compression.trial:
            from megatron_patch.session.trial import Row  # It imports torch, which --help need not wait for.

            for row in run_reader.read_run(folder).trial:
                say(f"  {Row(**{name: value for name, value in row.items() if name != 'verdict'})}")
    else:
        say(f"node {configured.launch.node_rank} has ended; see {folder}")
    return 0


def _check_restartable(run: RunConfig, folder: Path) -> None:
    """Refuse settings by which a job that a scheduler stops and restarts would never reach its end."""
    if run.megatron.get("save_interval") is None:
        raise UserError(
            "megatron.save_interval: not set, so a job that is stopped and started again would begin at "
            "step 0 every time; set it (megatron.save_interval=STEPS), or leave --resume-or-start out"
        )
    run_folder.refuse_other_checkpoints(run, folder, started_again=True)
