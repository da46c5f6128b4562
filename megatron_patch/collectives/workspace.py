"""What the exchanges of one model chunk share: buffers for payloads on their way, and a stopwatch.

Buffers are taken, used and given back, so that a steady state allocates nothing. The stopwatch adds up the
time spent in compressing and decompressing, apart from the time that payloads travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Workspace:
    """uint8 buffers, reused by shape and, on CUDA, by stream; and the time of the work between them.

    A buffer goes to its next user without waiting for the last one's work, which is safe only on one and
    the same stream: expert and dense bucket groups may run on different ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._free: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """A buffer of [rows, columns] for work on the current stream, contents undefined."""
        free = self._free.get(self._key(rows, columns))
        if free:
            return free.pop()
        self.nbytes += rows * columns
        return torch.empty(rows, columns, dtype=torch.uint8, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back; its last work must be on the current stream."""
        self._free.setdefault(self._key(buffer.shape[0], buffer.shape[1]), []).append(buffer)

    def _key(self, rows: int, columns: int) -> tuple[int, int, int]:
        on_cuda = self.device.type == "cuda"
        return rows, columns, torch.cuda.current_stream(self.device).cuda_stream if on_cuda else 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the work of the block: on CUDA by events on the current stream, without waiting for it."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)

    def lap(self) -> Callable[[], float]:
        """Start counting anew; the answer tells the seconds until now, waiting for the work if it must."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []

        def told() -> float:
            if events:
                events[-1][1].synchronize()
            return seconds + sum(start.elapsed_time(end) for start, end in events) / 1e3

        return told
