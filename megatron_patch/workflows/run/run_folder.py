"""Determines the state of a run's folder, whether a run may begin there, and locks it for one process.

The folders are the only record of how far an ablation, or a comparison, has come.

    config.yaml alone           interrupted: it resumes from its last checkpoint, or starts anew without one
    summary.json                done: the run writes it last, in one piece; but with fewer steps than wanted
                                the run is interrupted, because Megatron saved and ended on request
    failed.txt                  failed: it has the launcher's report of the failure

A folder whose config.yaml differs from the wanted configuration is `changed`: its numbers would be compared
with those of other settings. Checkpoints are Megatron's own, FOLDER/checkpoints/iter_0000050, or below
megatron.save: all code that saves, loads or resumes a run gets their folder from `place`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron_patch.errors import UserError
from megatron_patch.files import check_output, write_whole
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows import run_reader
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import RunConfig

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of a file system that is mounted without locks, e.g. Lustre without -o flock."""
_APPENDED = ("metrics.jsonl", "tensorboard", "logs")
"""The files and folders to which a resumed run appends."""
_REMOVE = "remove it to have the run made again"
_NEEDED = (("steps",), ("world_size",), ("valid_loss",))


class State(enum.Enum):
    """How far a run has come."""

    NEW = "not run"
    INTERRUPTED = "interrupted"
    DONE = "done"
    FAILED = "failed"
    CHANGED = "changed"


# --- how far a run has come ------------------------------------------------------------------------------


def look(folder: Path, wanted: RunConfig) -> State:
    """Return the state of the run in `folder`, which should have the configuration `wanted`."""
    path = folder / "config.yaml"
    if not path.exists():
        return State.NEW
    if _loaded(path, path.stat().st_mtime_ns) != wanted:
        begun = summary(folder) or failure(folder) or latest_step(place(wanted, folder)) is not None
        return State.CHANGED if begun else State.NEW
    if failure(folder) is not None:
        return State.FAILED
    result = summary(folder)
    whole = result is not None and result["steps"] >= int(wanted.megatron.get("train_iters") or 0)
    return State.DONE if whole else State.INTERRUPTED


@functools.cache  # An ablation looks at all of its runs after every run.
def _loaded(path: Path, written: int) -> RunConfig | None:
    """Return the configuration in `path`; None if it is of another version, or incomplete after a kill."""
    try:
        return configuration.load(path)
    except UserError:
        return None


def summary(folder: Path, also: Sequence[Sequence[str]] = ()) -> dict[str, Any] | None:
    """Return summary.json of a run that has ended; None if there is no such file.

    Args:
        also: the keys of further values that must be numbers.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    content = run_reader.read_summary(folder)
    for keys in (*_NEEDED, *also):
        value: Any = content
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not (run_reader.is_number(value) or (value is None and keys == ("valid_loss",))):
            raise UserError(f"{path}: {'.'.join(keys)}: {value!r:.60} is no number; {_REMOVE}")
    for name in ("device", "versions"):
        if not content.get(name):
            raise UserError(f"{path}: {name}: missing; {_REMOVE}")
    return content


def failure(folder: Path) -> str | None:
    """Return the report of why the run failed; None if it did not."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8") if path.exists() else None


def note_failure(folder: Path, report: str) -> None:
    """Write the report of a failure to failed.txt, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "failed.txt", report.rstrip() + "\n")


def forget_failure(folder: Path) -> None:
    """Remove failed.txt before the run is tried again."""
    (folder / "failed.txt").unlink(missing_ok=True)


# --- its checkpoints -------------------------------------------------------------------------------------


def place(run: RunConfig, folder: Path) -> Path:
    """Return the folder where `run`, in `folder`, saves its checkpoints, and from which it resumes."""
    save = str(run.megatron.get("save") or folder / "checkpoints")
    if "://" in save:  # Path would make the local folder msc:/bucket of msc://bucket.
        raise UserError(
            f"megatron.save: {save!r}: a run resumes from a folder of a file system; with "
            "python -m megatron_patch.launch Megatron saves to an object store"
        )
    return Path(save)


def latest_step(checkpoints: Path) -> int | None:
    """Return the step of the checkpoint that Megatron would load; None if there is none.

    It repairs the tracker file, so that the caller must hold the lock of the run's folder.
    """
    tracker.repair(checkpoints)
    return tracker.latest(checkpoints)


def refuse_other_checkpoints(run: RunConfig, folder: Path, *, started_again: bool = False) -> None:
    """Refuse settings by which a restarted `run` would not load its own checkpoints.

    Args:
        started_again: whether a scheduler will repeat the command, so that there may be no checkpoints yet.
    """
    own = place(run, folder)
    load, finetune = run.megatron.get("load"), run.megatron.get("finetune")
    key = "load" if load and Path(str(load)).resolve() != own.resolve() else "finetune" if finetune else None
    if key is None:
        return
    restarts = run.launch.max_restarts and run.megatron.get("save_interval") is not None
    if tracker.latest(own) is not None:
        raise UserError(
            f"megatron.{key}: {run.megatron[key]!r}: the run in {folder} resumes from checkpoints of its "
            f"own; leave it out: megatron.{key}=null"
        )
    if started_again or restarts:
        cause = "--resume-or-start" if started_again else f"launch.max_restarts={run.launch.max_restarts}"
        raise UserError(
            f"megatron.{key}: {run.megatron[key]!r} would hold for every restart too ({cause}), in place of "
            "the run's own checkpoints; to begin with other weights use megatron.pretrained_checkpoint=DIR"
        )


def refuse_shared(runs: Iterable[RunConfig]) -> None:
    """Refuse megatron.save, by which several runs would save into the same folder."""
    for run in runs:
        if run.megatron.get("save"):
            raise UserError(
                f"megatron.save: {run.megatron['save']!r}: several runs would save there; each has a folder "
                "of its own below --out: megatron.save=null"
            )


# --- a run begins ----------------------------------------------------------------------------------------


def check_folder(folder: Path, checkpoints: Path, overwrite: bool, resume: bool = False) -> None:
    """Check that a run that saves in `checkpoints` may start in `folder`, or resume there.

    Raises:
        UserError: the folder holds a run, and neither `overwrite` nor `resume` is set; there are checkpoints
            without `resume`; or there are none with `resume`.
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


def check_unchanged(folder: Path, wanted: RunConfig) -> None:
    """Refuse to resume the run in `folder` if it has another configuration."""
    if look(folder, wanted) is State.CHANGED:
        raise UserError(
            f"out: {folder} holds a run of another configuration; choose another folder, or add --overwrite "
            "to run it again"
        )


def begin(folder: Path, files: dict[str, str], *, resume: bool = False) -> None:
    """Prepare `folder` for a run's ranks: write `files`, and remove the earlier run's results.

    Args:
        files: the texts of config.yaml and command.txt, by name.
        resume: whether to keep the files to which a resumed run appends.
    """
    try:
        # The summary is removed first: a kill in between must not leave it beside another run's config.yaml.
        for name in ("summary.json", "failures", *(() if resume else _APPENDED)):
            _remove(folder / name)
        for name, text in files.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error


def clear(folder: Path) -> None:
    """Remove all files of a run with its checkpoints, except the file of the lock, which is held."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(folder: Path, command: str, wait: float = 0, option: str = "out") -> Iterator[None]:
    """Create `folder`, and lock it within the block against other processes.

    The lock ends with this process, even if it is killed. Blocks of one process may be nested.

    Args:
        command: the command that the message names as the holder of the lock.
        wait: the seconds to wait for another process's end.
        option: the option that the message names as the source of the folder.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder.resolve() / _LOCK, is_singleton=True)
            held.enter_context(lock.acquire(timeout=wait))
        except Timeout as error:
            raise UserError(f"{option}: another `{command}` is at work in {folder}") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise UserError(f"{option}: {folder} cannot be written: {error.strerror}") from error
            print(f"{folder} has no locks: see that only one `{command}` works there", file=sys.stderr)
        yield
