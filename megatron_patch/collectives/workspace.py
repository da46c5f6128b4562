"""Buffers for payloads, which all exchanges share, and stopwatches.

Buffers are taken, used and given back, so that no step after the first ones allocates memory. All model
chunks of a rank share them: chunks whose gradients are one bucket (Megatron's pipeline ranks above 0, and its
later virtual chunks) need large buffers, but one chunk after the other.
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
    """uint8 buffers, pooled by use and, on CUDA, by stream; and the streams of overlapped exchanges.

    A buffer is reused without waiting for the work of its last user, which is safe only on the same stream;
    expert and dense bucket groups may run on different streams. If all free buffers are too small, one is
    replaced by a larger one, so that the pool has no more buffers than were ever in use at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._taken: MutableMapping[torch.Tensor, tuple[_Key, torch.Tensor]] = WeakIdKeyDictionary()
        """The buffer behind each view of `take`, by weak references: a failed exchange gives nothing back."""
        self._streams: dict[dist.ProcessGroup, torch.cuda.Stream] = {}
        self.in_flight: dict[dist.ProcessGroup | None, deque[Any]] = {}
        """Handles of exchanges that may be under way, by process group."""

    def take(self, rows: int, columns: int, use: str = "payload") -> torch.Tensor:
        """Return a buffer [rows, columns] with undefined contents, for work on the current stream.

        Each `use` has buffers of its own, since sizes differ between uses.
        """
        size, key = rows * columns, (use, self._stream())
        free = self._free.setdefault(key, [])
        fitting = [(buffer.numel(), place) for place, buffer in enumerate(free) if buffer.numel() >= size]
        if fitting:
            whole = free.pop(min(fitting)[1])
        else:
            if free:
                free.pop()
            with torch.inference_mode(False):  # The first user may be an evaluation in inference mode.
                whole = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        buffer = whole[:size].view(rows, columns)
        self._taken[buffer] = key, whole
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Give back a buffer of `take`; its last work must be on the stream on which it was taken."""
        key, whole = self._taken.pop(buffer)
        self._free.setdefault(key, []).append(whole)

    def release(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, in use or free."""
        taken = [whole for _, whole in self._taken.values()]
        return sum(whole.numel() for whole in itertools.chain(taken, *self._free.values()))

    def _stream(self) -> int:
        on_cuda = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).cuda_stream if on_cuda else 0

    def stream_of(self, group: dist.ProcessGroup) -> torch.cuda.Stream:
        """Return the CUDA stream on which overlapped exchanges over `group` run."""
        if group not in self._streams:
            self._streams[group] = torch.cuda.Stream(self.device)
        return self._streams[group]


_shared: WeakValueDictionary[torch.device, Pool] = WeakValueDictionary()


def shared_pool(device: torch.device) -> Pool:
    """Return the pool that all attached model chunks on `device` share."""
    return _shared.setdefault(device, Pool(device))


def forget_shared_pools() -> None:
    """Have model chunks that are attached from now on use a new pool, apart from that of earlier ones."""
    _shared.clear()


class Stopwatch:
    """Adds up the time of blocks; blocks within such blocks count once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._within = False
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the work of the block: on CUDA by events on the current stream, without waiting for it."""
        if self._within:
            yield
            return
        self._within = True
        try:
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
        finally:
            self._within = False

    def lap(self) -> Callable[[], float]:
        """Restart the stopwatch; returns a callable that waits for the work and gives the elapsed seconds."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []

        def elapsed() -> float:
            for _, end in events:  # Expert and dense exchanges may run on different streams.
                end.synchronize()
            return seconds + sum(start.elapsed_time(end) for start, end in events) / 1e3

        return elapsed


class Workspace(Stopwatch):
    """A pool of buffers, and a stopwatch for compressing and decompressing, without the collectives.

    Args:
        device: the device of the buffers.
        pool: a shared pool; None: a pool of its own.
    """

    def __init__(self, device: torch.device, pool: Pool | None = None) -> None:
        super().__init__(device)
        self.pool = pool or Pool(device)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def take(self, rows: int, columns: int, use: str = "payload") -> torch.Tensor:
        return self.pool.take(rows, columns, use)

    def give(self, buffer: torch.Tensor) -> None:
        self.pool.give(buffer)
