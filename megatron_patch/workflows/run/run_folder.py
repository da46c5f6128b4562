"""What a run's folder says of it, whether a run may begin there, and the lock that keeps it to one process.

The folders are the only record of how far an ablation, or a comparison, has come.

    config.yaml alone           interrupted: it resumes from its last checkpoint, or starts anew without one
    summary.json                done: written in one piece, as the run's last act; of fewer steps than were
                                asked for, interrupted: Megatron saved and ended on request
    failed.txt                  failed: the launcher's report of why

A folder whose config.yaml is another one than is now asked for is `changed`: its numbers would be compared
with those of other settings. Checkpoints are Megatron's own, FOLDER/checkpoints/iter_0000050, or below
megatron.save: everything that saves, loads, resumes or asks how far a run has come gets the place from here.
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
"""A file system that is mounted without them, e.g. Lustre without -o flock."""
_APPENDED = ("metrics.jsonl", "tensorboard", "logs")
"""What a resumed run writes on."""
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


# --- its checkpoints -------------------------------------------------------------------------------------


def place(run: RunConfig, folder: Path) -> Path:
    """Where `run`, in `folder`, saves its checkpoints, and resumes from."""
    return Path(str(run.megatron.get("save") or folder / "checkpoints"))


def latest_step(checkpoints: Path) -> int | None:
    """The step of the checkpoint below `checkpoints` that Megatron would load, None if there is none.

    It repairs the tracker file, so the caller must hold the run's folder.
    """
    tracker.repair(checkpoints)
    return tracker.latest(checkpoints)


def refuse_other_checkpoints(run: RunConfig, folder: Path, *, started_again: bool = False) -> None:
    """See that a start of `run` which finds checkpoints of its own would load them.

    Args:
        started_again: the same command will be given again, whether there are checkpoints yet or not.
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
    """See that several runs do not save into one folder."""
    for run in runs:
        if run.megatron.get("save"):
            raise UserError(
                f"megatron.save: {run.megatron['save']!r}: several runs would save there; each has a folder "
                "of its own below --out: megatron.save=null"
            )


# --- a run begins ----------------------------------------------------------------------------------------


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


def check_unchanged(folder: Path, wanted: RunConfig) -> None:
    """Look whether the run in `folder` may be resumed."""
    if look(folder, wanted) is State.CHANGED:
        raise UserError(
            f"out: {folder} holds a run of another configuration; choose another folder, or add --overwrite "
            "to run it again"
        )


def begin(folder: Path, files: dict[str, str], *, resume: bool = False) -> None:
    """Make `folder` ready for a run's ranks; what a run that is not resumed left there goes.

    Args:
        files: what is written there: config.yaml and command.txt.
    """
    try:
        # The summary first: a kill in between must not leave it beside another run's config.yaml.
        for name in ("summary.json", "failures", *(() if resume else _APPENDED)):
            _remove(folder / name)
        for name, text in files.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error


def clear(folder: Path) -> None:
    """Remove everything of a run, its checkpoints too; the lock's file stays, for it is held."""
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
    """Within the block no other process gets into the same block for `folder`, which is created.

    The lock ends with this process, however that ends. Blocks of one process may be nested.

    Args:
        command: what the other process is called in the message.
        wait: for how many seconds to wait for the other process's end.
        option: what says that it is this folder.
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
