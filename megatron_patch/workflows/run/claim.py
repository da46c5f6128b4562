"""A run's folder until its ranks' first step: the earlier run's record can still come back.

Only the ranks can tell whether a checkpoint can be resumed, or an option used. Until they have, nothing of
an earlier run is lost: a new run sets its record aside, a resumed one leaves it in place.

    new run      config.yaml and command.txt are written at once; what was there is in FOLDER/.before
    resumed run  config.yaml and command.txt stay the earlier run's, and so does summary.json

From the first logged step on the folder is this run's alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.files import write_whole
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows.run import run_folder

_APPENDED = ("tensorboard", "logs")
_ALL = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json", *_APPENDED, "failures")


class Claim:
    """Make `folder` ready for a run, whose ranks may then start; the caller holds it (only_one.py).

    Args:
        checkpoints: where the run saves.
        files: config.yaml and command.txt, with the text that each of them shall have.
        shared: other nodes write to the folder, too.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Path,
        files: dict[str, str],
        *,
        overwrite: bool = False,
        resume: bool = False,
        shared: bool = False,
    ) -> None:
        self._folder, self._checkpoints, self._files = folder, checkpoints, files
        self._resume, self._shared, self._begun = resume, shared, False
        self._aside = folder / ".before"
        try:
            self._recover()
            run_folder.check_folder(folder, checkpoints, overwrite, resume)
            self._step = tracker.latest(checkpoints)
            self._sizes = _sizes(folder) if resume else {}
        except OSError as error:
            raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error
        names = ("failures",) if resume else _ALL
        try:
            _move(folder, self._aside, names)
            self._replaces = resume or self._aside.exists()
            self._metrics = _identity(folder / "metrics.jsonl")
            self._summary = _identity(folder / "summary.json")
            if not resume:
                self._write()
        except OSError as error:
            with contextlib.suppress(OSError):
                _put_back(folder, self._aside, names)
                self._aside.rmdir()
            raise UserError(f"out: {folder} cannot be written: {error.strerror}") from error

    def look(self) -> None:
        """Call it often while ranks run: with their first logged step the folder becomes this run's."""
        if not self._begun and _identity(self._folder / "metrics.jsonl") not in (None, self._metrics):
            self.begin()

    def begin(self) -> None:
        """The ranks have accepted what was asked for: the earlier run's record goes."""
        if self._begun:
            return
        self._begun = True
        if self._resume:
            if self._summary is not None and _identity(self._folder / "summary.json") == self._summary:
                (self._folder / "summary.json").unlink()
            self._write()
        shutil.rmtree(self._aside, ignore_errors=True)

    def give_up(self, *, refused: bool) -> None:
        """The ranks ended with an error: unless they had begun, the earlier run's record is back.

        Args:
            refused: the error is a mistake of the user's, of which one line says everything, so that logs
                are as before, too; other nodes' launchers may still be reading them.
        """
        self.look()
        if self._begun or not self._replaces or tracker.latest(self._checkpoints) != self._step:
            return
        traces = refused and not self._shared
        if self._resume and traces:
            _shrink(self._folder, self._sizes)
        if self._resume:
            names: tuple[str, ...] = ("failures",) if traces else ()
        else:
            names = _ALL if traces else tuple(name for name in _ALL if name not in ("logs", "failures"))
        _put_back(self._folder, self._aside, names)
        shutil.rmtree(self._aside, ignore_errors=True)

    def _recover(self) -> None:
        """Finish what a launcher that was killed here had to do: keep its run if that had begun."""
        begun = (self._folder / "metrics.jsonl").exists() or tracker.latest(self._checkpoints) is not None
        if self._aside.exists() and not begun:
            _put_back(self._folder, self._aside, _ALL)
        shutil.rmtree(self._aside, ignore_errors=True)

    def _write(self) -> None:
        for name, text in self._files.items():
            write_whole(self._folder / name, text)


def _move(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).exists():
            target.mkdir(exist_ok=True)
            (source / name).rename(target / name)


def _put_back(folder: Path, aside: Path, names: tuple[str, ...]) -> None:
    """Have those of `names` that were set aside in place of what is there now."""
    for name in names:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    _move(aside, folder, names)


def _below(folder: Path) -> list[Path]:
    """What ranks append to, deepest first."""
    return sorted((path for name in _APPENDED for path in (folder / name).rglob("*")), reverse=True)


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in _below(folder)}


def _shrink(folder: Path, sizes: dict[Path, int]) -> None:
    """Take away what has been appended to logs and TensorBoard's files since they had these sizes."""
    for path in _below(folder):
        if path.is_dir():
            if path not in sizes:
                path.rmdir()
        elif path not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path]:
            os.truncate(path, sizes[path])


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file stands at `path`: another one once it has been replaced; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
