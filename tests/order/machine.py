"""One GPU of a rank as the order of its work is concerned: queues, events, memory, and who waits for whom.

Time is a vector clock: how many operations of each queue (a CUDA stream, a communicator's own) are known to
be over. An operation knows all that its queue and the host have waited for. Two operations on a byte, one of
them a write, must be ordered: the later one knows of the earlier. That is stricter than any one run: work is
launched long before it runs, and may be late or early.

    machine.launch(queue, "compress", reads=[gradient], writes=[payload])
    event = machine.record(queue)
    machine.wait(other, event)

Memory follows the rule of torch's caching allocator. What is freed may at once be used anew by the queue that
it was allocated on; other queues' work on it must be over by what that queue knows, unless `record_stream`
was called.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from order.byte_sets import Bytes, bytes_of

_MOST = 32
"""Queues of a machine."""


@dataclass(eq=False)
class Queue:
    """A stream. Its operations are in order."""

    name: str
    number: int
    knows: np.ndarray = field(default_factory=lambda: np.zeros(_MOST, dtype=np.int64))

    @property
    def launched(self) -> int:
        """How many of its operations were launched."""
        return int(self.knows[self.number])


class Allocation:
    """A storage: by byte the last write, and each queue's last read."""

    def __init__(self, nbytes: int, queue: Queue, what: str) -> None:
        self.queue = queue
        self.what = what
        self.nbytes = nbytes
        self.written_by = np.zeros(nbytes, dtype=np.int16)
        self.written_at = np.zeros(nbytes, dtype=np.int64)
        self.writer = np.zeros(nbytes, dtype=np.int32)
        self.read_at: dict[int, np.ndarray] = {}
        self.reader: dict[int, int] = {}
        self.recorded: set[int] = set()
        """Numbers of queues that the allocator waits for."""


class Machine:
    """Streams and memory of one rank.

    Attributes:
        found: what is wrong, one line each.
        operations: names of all that was launched.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.operations: list[str] = ["nothing"]
        self.queues: list[Queue] = []
        self.host = np.zeros(_MOST, dtype=np.int64)
        self._memory: dict[int, Allocation] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.ended = False

    def queue(self, name: str) -> Queue:
        """A new queue."""
        self.queues.append(Queue(name, len(self.queues)))
        return self.queues[-1]

    # --- memory -------------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this machine's memory."""
        return tensor.untyped_storage()._cdata in self._memory

    def allocate(self, tensor: torch.Tensor, queue: Queue, what: str) -> None:
        """A tensor's storage was allocated on a queue: its memory was in use there until now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._memory:
            return
        allocation = Allocation(storage.nbytes(), queue, what)
        self._memory[key] = allocation
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key))
        self._begin(queue, f"allocation for {what}")
        allocation.written_by[:] = queue.number
        allocation.written_at[:] = queue.launched
        allocation.writer[:] = len(self.operations) - 1

    def record_stream(self, tensor: torch.Tensor, queue: Queue) -> None:
        """The allocator waits for the queue's work on a tensor before it gives its memory away."""
        self._memory[tensor.untyped_storage()._cdata].recorded.add(queue.number)

    def _free(self, key: int) -> None:
        allocation = self._memory.pop(key)
        del self._storages[key]
        if self.ended:
            return
        knows = np.maximum(allocation.queue.knows, self.host)
        if allocation.recorded:
            knows = knows.copy()
            knows[list(allocation.recorded)] = np.iinfo(np.int64).max
        self._check(allocation, slice(0, allocation.nbytes), knows, True, f"freed on {allocation.queue.name}")

    # --- work ---------------------------------------------------------------------------------------------

    def launch(
        self, queue: Queue, what: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> np.ndarray:
        """An operation on tensors of this machine's memory; others are left out. Returns what it knows."""
        self._begin(queue, what)
        name = f"{what} on {queue.name}"
        for tensor in reads:
            self._touch(tensor, queue, False, name)
        for tensor in writes:
            self._touch(tensor, queue, True, name)
        return queue.knows

    def launch_on_bytes(self, queue: Queue, what: str, touched: Iterable[tuple[int, int, bool]]) -> None:
        """As `launch`, of (address, bytes, whether they are written)."""
        self._begin(queue, what)
        for address, nbytes, writes in touched:
            allocation, start = self._at(address)
            place = slice(start, start + nbytes)
            self._access(allocation, place, queue, writes, f"{what} on {queue.name}")

    def _at(self, address: int) -> tuple[Allocation, int]:
        for key, held in self._storages.items():
            storage = held()
            if storage is not None and 0 <= address - storage.data_ptr() < storage.nbytes():
                return self._memory[key], address - storage.data_ptr()
        raise AssertionError(f"no memory of this machine is at {address:#x}")

    def _begin(self, queue: Queue, what: str) -> None:
        queue.knows = np.maximum(queue.knows, self.host)
        queue.knows[queue.number] += 1
        self.operations.append(what)

    def _touch(self, tensor: torch.Tensor, queue: Queue, writes: bool, what: str) -> None:
        allocation = self._memory.get(tensor.untyped_storage()._cdata)
        place = bytes_of(tensor)
        if allocation is not None and place is not None:
            self._access(allocation, place, queue, writes, what)

    def _access(self, allocation: Allocation, place: Bytes, queue: Queue, writes: bool, what: str) -> None:
        self._check(allocation, place, queue.knows, writes, what)
        number, at = queue.number, queue.launched
        if writes:
            allocation.written_by[place] = number
            allocation.written_at[place] = at
            allocation.writer[place] = len(self.operations) - 1
            return
        if number not in allocation.read_at:
            allocation.read_at[number] = np.zeros(allocation.nbytes, dtype=np.int64)
        allocation.read_at[number][place] = at
        allocation.reader[number] = len(self.operations) - 1

    def _check(
        self, allocation: Allocation, place: Bytes, knows: np.ndarray, writes: bool, what: str
    ) -> None:
        late = allocation.written_at[place] > knows[allocation.written_by[place]]
        if late.any():
            writer = self.operations[int(allocation.writer[place][late][0])]
            by = self.queues[int(allocation.written_by[place][late][0])].name
            self._tell(what, allocation, int(late.sum()), f"not ordered after {writer} on {by}")
        if writes:
            for number, read_at in allocation.read_at.items():
                late = read_at[place] > knows[number]
                if late.any():
                    reader = self.operations[allocation.reader[number]]
                    by = self.queues[number].name
                    self._tell(
                        what, allocation, int(late.sum()), f"not ordered after {reader}'s read on {by}"
                    )

    def _tell(self, what: str, allocation: Allocation, nbytes: int, why: str) -> None:
        self.found.append(f"{what}: {nbytes} bytes of {allocation.what}: {why}")

    # --- order --------------------------------------------------------------------------------------------

    def record(self, queue: Queue) -> np.ndarray:
        """An event: what is known when all that was launched on the queue is over."""
        return np.maximum(queue.knows, self.host)

    def wait(self, queue: Queue, event: np.ndarray) -> None:
        """What is launched on the queue from now on waits for the event."""
        queue.knows = np.maximum(queue.knows, event)

    def wait_on_host(self, event: np.ndarray) -> None:
        """The host waits for the event, and launches all that follows after it."""
        self.host = np.maximum(self.host, event)

    def over(self, event: np.ndarray) -> bool:
        """Whether the host knows that the event has come."""
        return bool((self.host >= event).all())
