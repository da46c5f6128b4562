"""What a run's folder says of it, and whether a run may begin there.

The folders are the only record of how far an ablation, or a comparison, has come.

    config.yaml alone           interrupted: it resumes from its last checkpoint, or starts anew without one
    summary.json                done: written in one piece, as the run's last act; of fewer steps than were
                                asked for, interrupted: Megatron saved and ended when told to
    failed.txt                  failed: the launcher's report of why

A folder whose config.yaml is another one than is now asked for is `changed`: its numbers would be compared
with those of other settings.
"""

from __future__ import annotations

import enum
import functools
import json
import shutil
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.files import write_whole
from megatron_patch.workflows.run import checkpoints, configuration
from megatron_patch.workflows.run.configuration import RunConfig

_OWN_FILES = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json")
_OWN_FOLDERS = ("tensorboard", "logs", "failures")


class State(enum.Enum):
    """How far a run has come."""

    NEW = "not run"
    INTERRUPTED = "interrupted"
    DONE = "done"
    FAILED = "failed"
    CHANGED = "changed"


def look(folder: Path, wanted: RunConfig) -> State:
    """The state of the run in `folder`, which should have the configuration `wanted`."""
    path = folder / "config.yaml"
    if not path.exists():
        return State.NEW
    if _loaded(path, path.stat().st_mtime_ns) != wanted:
        begun = summary(folder) or failure(folder) or checkpoints.latest_step(folder) is not None
        return State.CHANGED if begun else State.NEW
    if failure(folder) is not None:
        return State.FAILED
    found = summary(folder)
    whole = found is not None and found["steps"] >= int(wanted.megatron.get("train_iters") or 0)
    return State.DONE if whole else State.INTERRUPTED


def check_unchanged(folder: Path, wanted: RunConfig) -> None:
    """Look whether the run in `folder` may be gone on with.

    Raises:
        UserError: it has another configuration.
    """
    if look(folder, wanted) is State.CHANGED:
        raise UserError(
            f"out: {folder} holds a run of another configuration; choose another folder, or add --overwrite "
            "to make it anew"
        )


def check_folder(folder: Path, overwrite: bool, resume: bool = False) -> None:
    """Look whether a run may start in `folder`, or be resumed there.

    Raises:
        UserError: it holds a run already, and neither `overwrite` nor `resume` was asked for; it holds
            checkpoints, which only `resume` may use; or it holds none to resume from.
    """
    step = checkpoints.latest_step(folder)
    if resume and step is None:
        raise UserError(
            f"resume: {folder} holds no checkpoint to resume from; start anew (--overwrite replaces a run), "
            "with megatron.save_interval=STEPS to have checkpoints written"
        )
    if step is not None and not resume:
        raise UserError(
            f"out: {folder} holds a run with checkpoints; add --resume to resume it "
            f"from step {step}, choose another folder, or remove {checkpoints.checkpoints(folder)} for a new "
            "start"
        )
    if (folder / "config.yaml").exists() and not overwrite and not resume:
        raise UserError(f"out: {folder} holds a run already; choose another folder or add --overwrite")


def claim_folder(folder: Path, overwrite: bool, resume: bool = False) -> None:
    """Make `folder` ready for a new run, or for one that resumes with its metrics, logs and TensorBoard.

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


@functools.cache  # an ablation asks after every run for all of them
def _loaded(path: Path, written: int) -> RunConfig | None:
    """The configuration in `path`, None if it is none: of another version, or torn by a kill."""
    try:
        return configuration.load(path)
    except UserError:
        return None


def summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run that is done."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def failure(folder: Path) -> str | None:
    """Why the run failed, None if it did not."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8") if path.exists() else None


def note_failure(folder: Path, report: str) -> None:
    """Remember that the run failed, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "failed.txt", report.rstrip() + "\n")


def forget_failure(folder: Path) -> None:
    """Before the run is tried again."""
    (folder / "failed.txt").unlink(missing_ok=True)
