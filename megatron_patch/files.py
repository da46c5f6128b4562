"""Files that are whole at every moment: written beside their place, then moved into it; results' folders."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from megatron_patch.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, in UTF-8: a reader, or a kill, finds the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def check_output(folder: Path, option: str = "out") -> None:
    """See that `folder` is one, or could be created; creates nothing.

    Raises:
        UserError: a file is in its place, or in that of a folder above it; or nothing may be written there.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    problem = None if above.is_dir() else errno.ENOTDIR
    if problem is None and not os.access(above, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise UserError(f"{option}: {folder} cannot be written: {above}: {os.strerror(problem)}")


def output_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder of a command's results, before the command computes them.

    Raises:
        UserError: it cannot be created, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror}") from error
