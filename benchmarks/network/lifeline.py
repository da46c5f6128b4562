"""Ensures that no process outlives the command; the next start removes what a killed one left on disk.

The command starts agents, and an agent starts ranks. Each first asks the kernel to be killed when its parent
ends (PR_SET_PDEATHSIG). So `kill -9` of the command ends them all, and a namespace disappears with its last
process (hosts.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PREFIX = "megatron-loco-network-"
"""The prefix of the folder with a run's sockets and logs, below the system's temporary folder."""
PARENT = "MEGATRON_LOCO_NETWORK_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; exit if it has ended. Children call it too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(PARENT) != str(os.getppid()):
        sys.exit("megatron-loco: the parent process is gone")
    os.environ[PARENT] = str(os.getpid())


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder for the length of the block, and remove those of runs that were killed."""
    remove_left_overs()
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The kernel releases it when this process ends, even by a kill.
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_left_overs() -> list[Path]:
    """Remove the folders of runs that have ended, and return them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP end the command as Ctrl-C does, so that everything is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
