"""What one input may take: seconds of the processor, and memory."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""Of the processor's time, which a loaded machine does not stretch."""
MEMORY = 1 << 30
"""Bytes beyond what the process has."""


class TooLong(BaseException):
    """Not an Exception: no handler of the code under test takes it for a mistake of the user's."""


def _stop(*_: Any) -> None:
    raise TooLong(f"more than {SECONDS} s of the processor")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends what runs inside when it takes too long, and fails its allocations when it takes too much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)
