"""A folder held against a second process that would write the same files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_patch.errors import UserError

FILE = ".lock"
_HELD: set[Path] = set()
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""A file system that is mounted without them, e.g. Lustre without -o flock."""


@contextlib.contextmanager
def only_one(folder: Path, command: str, wait: float = 0, option: str = "out") -> Iterator[None]:
    """Within the block no other process gets into the same block for `folder`, which is created.

    The lock ends with this process, however that ends. It is a POSIX lock: ranks that are forked do not
    inherit it, and shared file systems have it between nodes. Blocks of one process may be nested.

    Args:
        command: what the other process is called in the message.
        wait: for how many seconds to wait for the other process's end.
        option: what says that it is this folder.
    """
    place = folder.resolve()
    if place in _HELD:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE).open("a")
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror}") from error
    with file:
        deadline = time.monotonic() + wait
        while (problem := _lock(file.fileno())) in _TAKEN:
            if time.monotonic() >= deadline:
                raise UserError(f"{option}: another `{command}` is at work in {folder}")
            time.sleep(0.2)
        if problem is not None:
            print(f"{folder} has no locks: see that only one `{command}` works there", file=sys.stderr)
        _HELD.add(place)
        try:
            yield
        finally:
            _HELD.discard(place)


def _lock(descriptor: int) -> int | None:
    """Try to lock; returns None, or why not: one of _TAKEN or _NO_LOCKS."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (*_TAKEN, *_NO_LOCKS):
            return error.errno
        raise
    return None
