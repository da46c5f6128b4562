"""Being asked to stop: SIGTERM or SIGUSR1 reaches every rank as SIGTERM, so that a run can save and end.

Clusters that take machines back say so: Kubernetes and Slurm's preemption with SIGTERM, Slurm's `--signal`
with a signal of one's choice, SIGUSR1 here. Megatron's ranks, with `megatron.exit_signal_handler`, then
finish their step, save and end; without it they just end. Ctrl-C does not wait for a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether somebody has asked the run to stop, and with which signal."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._told = False

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler: remembers the first request; the launcher's loop does the rest."""
        self.name = self.name or signal.Signals(number).name

    def tell(self, pids: Iterable[int]) -> None:
        """Once asked to stop, hand it on to these processes; call it in every turn of the loop."""
        if self.name and not self._told:
            self._told = True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def noticed() -> Iterator[StopRequest]:
    """Within the block the signals in ASKING are noted instead of ending this process."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # others cannot set handlers
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in ASKING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Around a fork: what arrives meanwhile waits until the child has called `as_a_rank`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def as_a_rank() -> None:
    """In a rank: SIGTERM as Megatron wants to find it, SIGUSR1 left to the launcher.

    A scheduler may send SIGUSR1 to every process of a step; unhandled it would end torchrun and the ranks.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
