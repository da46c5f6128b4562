"""`megatron-loco train`: one run, from a configuration to a folder of results.

FOLDER/config.yaml     the resolved configuration          FOLDER/metrics.jsonl  a line per logged step
FOLDER/command.txt     the torchrun command                FOLDER/summary.json   written at the end
FOLDER/tensorboard/    Megatron's own and ours             FOLDER/logs/          one file per rank
FOLDER/checkpoints/    where megatron.save_interval asks for them
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.workflows import configuration, launcher, paths
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
        settings["save"] = settings["load"] = str(folder / "checkpoints")
    if run.data.path is not None:
        settings["data_cache_path"] = f"{run.data.path}-cache"
    return settings


def _is_number(item: object) -> bool:
    try:
        float(str(item))
    except ValueError:
        return False
    return True


def claim_folder(folder: Path, overwrite: bool) -> None:
    """Make `folder` ready for a new run.

    Raises:
        UserError: it holds a run already, and `overwrite` was not asked for.
    """
    if (folder / "config.yaml").exists() and not overwrite:
        raise UserError(f"out: {folder} holds a run already; choose another folder or add --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _OWN_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in _OWN_FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error


def execute(prepared: PreparedRun, label: str, overwrite: bool = False) -> dict[str, Any]:
    """Run to the end with a live progress line; returns summary.json.

    Raises:
        launcher.RankFailed: a rank failed; what it wrote is in FOLDER/logs.
        UserError: a mistake of the user's that only a rank could find.
    """
    folder = prepared.folder
    claim_folder(folder, overwrite)
    (folder / "config.yaml").write_text(prepared.run.as_yaml(), encoding="utf-8")
    (folder / "command.txt").write_text(prepared.job.command_text(), encoding="utf-8")
    with StepProgress(label, prepared.steps, folder / "metrics.jsonl") as progress:
        launcher.start(prepared.job, progress.tick)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco train`."""
    parser.add_argument(
        "config", type=str, metavar="CONFIG", help="a YAML file, e.g. configs/models/llama_tiny.yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. megatron.lr=1e-3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/CONFIG)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the results of a run in that folder"
    )


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """The command line's way in; returns the exit status."""
    path = paths.find(args.config)
    configured = configuration.load(path, args.overrides)
    folder = args.out or Path("runs") / path.stem
    if (folder / "config.yaml").exists() and not args.overwrite:
        claim_folder(folder, overwrite=False)  # refuses before Megatron is imported
    summary = execute(prepare_run(configured, folder), path.stem, args.overwrite)
    say(f"validation loss {summary['valid_loss']}, training loss {summary['train_loss']}; see {folder}")
    return 0
