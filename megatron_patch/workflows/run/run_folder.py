"""What a run's folder says of it, and whether a run may begin there.

The folders are the only record of how far an ablation, or a comparison, has come.

    config.yaml alone           interrupted: it resumes from its last checkpoint, or starts anew without one
    summary.json                done: written in one piece, as the run's last act; of fewer steps than were
                                asked for, interrupted: Megatron saved and ended on request
    failed.txt                  failed: the launcher's report of why

A folder whose config.yaml is another one than is now asked for is `changed`: its numbers would be compared
with those of other settings.
"""

from __future__ import annotations

import enum
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_patch import untrusted
from megatron_patch.errors import UserError
from megatron_patch.files import check_output, write_whole
from megatron_patch.workflows.report import checks
from megatron_patch.workflows.run import configuration, only_one
from megatron_patch.workflows.run.checkpoints import latest_step, place
from megatron_patch.workflows.run.configuration import RunConfig

_REMOVE = "remove it to have the run made again"
_NEEDED = (("steps",), ("world_size",), ("valid_loss",))


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
        begun = summary(folder) or failure(folder) or latest_step(place(wanted, folder)) is not None
        return State.CHANGED if begun else State.NEW
    if failure(folder) is not None:
        return State.FAILED
    found = summary(folder)
    whole = found is not None and found["steps"] >= int(wanted.megatron.get("train_iters") or 0)
    return State.DONE if whole else State.INTERRUPTED


def check_unchanged(folder: Path, wanted: RunConfig) -> None:
    """Look whether the run in `folder` may be resumed."""
    if look(folder, wanted) is State.CHANGED:
        raise UserError(
            f"out: {folder} holds a run of another configuration; choose another folder, or add --overwrite "
            "to run it again"
        )


def check_folder(folder: Path, checkpoints: Path, overwrite: bool, resume: bool = False) -> None:
    """Look whether a run that saves in `checkpoints` may start in `folder`, or be resumed there.

    Raises:
        UserError: it holds a run already, and neither `overwrite` nor `resume` was asked for; there are
            checkpoints, which only `resume` may use; or none to resume from.
    """
    check_output(folder)
    step = latest_step(checkpoints)
    if resume and step is None:
        raise UserError(
            f"resume: {checkpoints} holds no checkpoint to resume from; start anew (--overwrite replaces a "
            "run), with megatron.save_interval=STEPS to have checkpoints written"
        )
    if step is not None and not resume:
        raise UserError(
            f"out: {checkpoints} holds a run's checkpoints; add --resume to resume it from step {step}, "
            "choose another folder, or remove them for a new start"
        )
    if (folder / "config.yaml").exists() and not overwrite and not resume:
        raise UserError(f"out: {folder} holds a run already; choose another folder or add --overwrite")


@functools.cache  # an ablation asks after every run for all of them
def _loaded(path: Path, written: int) -> RunConfig | None:
    """The configuration in `path`, None if it is none: of another version, or torn by a kill."""
    try:
        return configuration.load(path)
    except UserError:
        return None


def summary(folder: Path, also: Sequence[Sequence[str]] = ()) -> dict[str, Any] | None:
    """summary.json of a run that has ended; None without one.

    Args:
        also: where numbers must be, beside those that say how far the run came.
    """
    path = folder / "summary.json"
    try:
        content = untrusted.load_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except untrusted.Unfit as error:
        raise UserError(f"{path} is no JSON: {error}; {_REMOVE}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no summary of a run; {_REMOVE}")
    checks.check_summary(content, str(path))
    for keys in (*_NEEDED, *also):
        value: Any = content
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not (checks.is_number(value) or (value is None and keys == ("valid_loss",))):
            raise UserError(f"{path}: {'.'.join(keys)}: {value!r:.60} is no number; {_REMOVE}")
    for name in ("device", "versions"):
        if not content.get(name):
            raise UserError(f"{path}: {name}: missing; {_REMOVE}")
    return content


def clear(folder: Path) -> None:
    """Remove everything of a run, its checkpoints too; the lock's file stays, for it is held."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != only_one.FILE:
            path.unlink()


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
