"""`megatron-loco train`: one run, from a configuration to a folder of results.

FOLDER/config.yaml     the resolved configuration          FOLDER/metrics.jsonl  a line per logged step
FOLDER/command.txt     the torchrun command                FOLDER/summary.json   written at the end
FOLDER/tensorboard/    Megatron's own and ours             FOLDER/logs/          one file per rank
FOLDER/checkpoints/    where megatron.save_interval asks for them

A run that was ended goes on from its last checkpoint with --resume; launch.max_restarts does so by itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.workflows import checkpoints, configuration, launcher, paths
from megatron_patch.workflows.configuration import RunConfig
from megatron_patch.workflows.data_files import check_dataset, load_manifest
from megatron_patch.workflows.progress import StepProgress

_OWN_FILES = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json")
_OWN_FOLDERS = ("tensorboard", "logs", "failures")


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked as far as one can without starting it."""

    run: RunConfig
    job: launcher.Job
    steps: int

    @property
    def folder(self) -> Path:
        return self.job.folder


def prepare_run(run: RunConfig, folder: Path) -> PreparedRun:
    """Prepare the data, resolve and check the flags. Imports Megatron (on CPU with its stand-ins).

    Raises:
        UserError: whatever of the configuration cannot run.
    """
    script = paths.find(run.launch.script)
    if not script.is_file():
        raise UserError(f"launch.script: {run.launch.script!r}: no such file")
    for key in ("load", "finetune"):
        if checkpoints.latest_step(folder) is not None and run.megatron.get(key):
            raise UserError(
                f"megatron.{key}: {run.megatron[key]!r}: the run in {folder} goes on from checkpoints of its "
                f"own; leave it out: megatron.{key}=null"
            )
    on_cpu = run.launch.device == "cpu"
    if on_cpu:
        from megatron_patch.integration import cpu_device

        cpu_device.install()
    from megatron_patch.workflows import megatron_flags

    parser = megatron_flags.build_parser()
    settings = {**(cpu_device.CPU_FLAGS if on_cpu else {}), **run.megatron}
    # The user's own keys are looked at before minutes go into preparing data.
    megatron_flags.flags_of(settings, parser)
    settings = {**_data_settings(run), **_folder_settings(run, folder), **settings}
    flags = [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
        *("--compression-device", run.launch.device, "--compression-output", str(folder)),
    ]
    args = megatron_flags.check(run, flags, parser)
    if on_cpu:  # it imports transformers: once here, and not in every rank that is forked from this process
        importlib.import_module("megatron.core.tokenizers.text")
    return PreparedRun(run, launcher.Job(run.launch, script, flags, folder), args.train_iters or 0)


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


def _folder_settings(run: RunConfig, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"tensorboard_dir": str(folder / "tensorboard")}
    if run.megatron.get("save_interval") is not None:
        settings["save"] = str(checkpoints.checkpoints(folder))
    if "save" in settings or checkpoints.latest_step(folder) is not None:
        settings["load"] = str(checkpoints.checkpoints(folder))
    if run.data.path is not None:
        settings["data_cache_path"] = f"{run.data.path}-cache"
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
    prepared: PreparedRun, label: str, overwrite: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Run to the end with a live progress line, from the last checkpoint if `resume`; returns summary.json.

    Raises:
        launcher.RankFailed: a rank failed; what it wrote is in FOLDER/logs.
        UserError: a mistake of the user's that only a rank could find.
    """
    folder = prepared.folder
    claim_folder(folder, overwrite, resume)
    (folder / "config.yaml").write_text(prepared.run.as_yaml(), encoding="utf-8")
    (folder / "command.txt").write_text(prepared.job.command_text(), encoding="utf-8")
    done = checkpoints.latest_step(folder) or 0
    with StepProgress(label, prepared.steps, folder / "metrics.jsonl", done) as progress:
        launcher.start(prepared.job, progress.tick, progress.say)
    written = folder / "summary.json"
    if not written.exists():  # e.g. megatron.exit_interval
        raise launcher.RankFailed(
            f"the run left no summary: Megatron ended before it did (see {prepared.job.logs})"
        )
    summary: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco train`."""
    add_run_arguments(parser).add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of the run in that folder"
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
    configured = configuration.load(path, args.overrides)
    folder = args.out or Path("runs") / path.stem
    check_folder(folder, args.overwrite, args.resume)  # before Megatron is imported
    summary = execute(prepare_run(configured, folder), path.stem, args.overwrite, args.resume)
    say(f"validation loss {summary['valid_loss']}, training loss {summary['train_loss']}; see {folder}")
    return 0
