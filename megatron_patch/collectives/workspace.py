"""Buffers for payloads, which all exchanges share, and a stopwatch for each model chunk.

Buffers are taken, used and given back, so that a steady state allocates nothing. All chunks of a rank use the
same ones: those whose gradients are one bucket (Megatron's pipeline ranks above 0, and its later virtual
chunks) need large ones, one chunk after the other. The stopwatch adds up the time spent in compressing and
decompressing, apart from the time that payloads travel.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

_Key = tuple[str, int]


class Pool:
    """uint8 buffers, reused by use and, on CUDA, by stream; and the streams of overlapped exchanges.

    A buffer goes to its next user without waiting for the last one's work, which is safe only on one and
    the same stream: expert and dense bucket groups may run on different ones. A buffer that is too small
    gives way to a larger one, so that no more are kept than were ever in use at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._taken: MutableMapping[torch.Tensor, tuple[_Key, torch.Tensor]] = WeakIdKeyDictionary()
        """By what was handed out, weakly: an exchange that failed, out of memory say, gives nothing back."""
        self._streams: dict[dist.ProcessGroup, torch.cuda.Stream] = {}
        self.in_flight: dict[dist.ProcessGroup | None, deque[Any]] = {}
        """Handles of exchanges that were begun and may be under way, by the group of ranks."""

    def take(self, rows: int, columns: int, use: str = "payload") -> torch.Tensor:
        """A buffer of [rows, columns] for work on the current stream, contents undefined.

        Buffers of another `use`, which are of other sizes, are kept apart.
        """
        size, key = rows * columns, (use, self._stream())
        free = self._free.setdefault(key, [])
        fitting = [(buffer.numel(), place) for place, buffer in enumerate(free) if buffer.numel() >= size]
        if fitting:
            whole = free.pop(min(fitting)[1])
        else:
            if free:
                free.pop()
            with torch.inference_mode(False):  # the user's evaluation may be the first to need it
                whole = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        buffer = whole[:size].view(rows, columns)
        self._taken[buffer] = key, whole
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Hand back what `take` returned; its last work must be on the stream that it was taken on."""
        key, whole = self._taken.pop(buffer)
        self._free.setdefault(key, []).append(whole)

    def release(self) -> None:
        """Free the buffers that are not in use; the next users get new ones."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        taken = [whole for _, whole in self._taken.values()]
        return sum(whole.numel() for whole in itertools.chain(taken, *self._free.values()))

    def _stream(self) -> int:
        on_cuda = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).cuda_stream if on_cuda else 0

    def stream_of(self, group: dist.ProcessGroup) -> torch.cuda.Stream:
        """The CUDA stream on which overlapped exchanges over a group of ranks run."""
        if group not in self._streams:
            self._streams[group] = torch.cuda.Stream(self.device)
        return self._streams[group]


_shared: WeakValueDictionary[torch.device, Pool] = WeakValueDictionary()


def shared_pool(device: torch.device) -> Pool:
    """The pool of all chunks that are attached at a time."""
    return _shared.setdefault(device, Pool(device))


def forget_shared_pools() -> None:
    """Chunks that are attached from now on have buffers of their own, whatever became of earlier ones."""
    _shared.clear()


class Workspace:
    """A pool of buffers, and the time of the work between them.

    Args:
        device: where the buffers are.
        pool: which one; None: one of its own.
    """

    def __init__(self, device: torch.device, pool: Pool | None = None) -> None:
        self.device = device
        self.pool = pool or Pool(device)
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all of the pool's buffers, in use or not."""
        return self.pool.nbytes

    def take(self, rows: int, columns: int, use: str = "payload") -> torch.Tensor:
        """Pool.take."""
        return self.pool.take(rows, columns, use)

    def give(self, buffer: torch.Tensor) -> None:
        """Pool.give."""
        self.pool.give(buffer)

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
        """Start counting anew; returns a callable that gives the elapsed seconds, and waits for the work."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []

        def elapsed() -> float:
            for _, end in events:  # of expert and dense exchanges on streams of their own
                end.synchronize()
            return seconds + sum(start.elapsed_time(end) for start, end in events) / 1e3

        return elapsed
