"""Memory of a GPU for a program of 128 threads, with what a real one does not check.

Global memory is some buffers with nothing between them; shared memory belongs to the program. A load or a
store must lie within one buffer and be aligned to its size, and what is loaded must have been written. In
shared memory two threads' accesses to a byte, one of them a write, must have a barrier between them; bytes
that cp.async brings are there after its thread has waited, and for others after a barrier, too. In global
memory no two programs of a launch may write the same byte, or read what the other wrote.
"""

from __future__ import annotations

import numpy as np

_WARP = 32


class Fault(Exception):
    """What the program must not do, in words."""


class Global:
    """Buffers, each with an address of its own."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._bytes: list[np.ndarray] = []
        self._names: list[str] = []
        self._written: list[np.ndarray] = []
        self._writer: list[np.ndarray] = []
        self.program = 0
        """Which of a launch's programs runs, from 1 on."""

    def put(
        self, name: str, array: np.ndarray, written: bool = True, offset: int = 0, at: int | None = None
    ) -> int:
        """Give a buffer, uint8 [bytes], an address: `at`, or `offset` behind a multiple of 256."""
        start = (1 << 32) + sum(len(one) + 4096 for one in self._bytes) // 256 * 256 + offset
        start += 256 * len(self._bytes)
        start = start if at is None else at
        self._starts.append(start)
        self._bytes.append(array)
        self._names.append(name)
        self._written.append(np.full(len(array), written))
        self._writer.append(np.zeros(len(array), dtype=np.int32))
        return start

    def launch(self) -> None:
        """A new launch: what earlier ones wrote is there."""
        for writer in self._writer:
            writer[:] = 0

    def _places(self, addresses: np.ndarray, size: int) -> tuple[int, np.ndarray]:
        """(number of the buffer, [threads, size] bytes in it)."""
        first = int(addresses[0])
        for number, start in enumerate(self._starts):
            if start <= first < start + len(self._bytes[number]):
                break
        else:
            raise Fault(f"global address {first:#x} is in no buffer")
        at = addresses.astype(np.int64) - start
        if (at < 0).any() or (at + size > len(self._bytes[number])).any():
            worst = int(at.min() if (at < 0).any() else at.max())
            raise Fault(
                f"byte {worst} and {size - 1} more of {self._names[number]}, which has "
                f"{len(self._bytes[number])}"
            )
        if (addresses % np.uint64(size)).any():
            raise Fault(f"{size} bytes at an address of {self._names[number]} that is no multiple of {size}")
        return number, at[:, None] + np.arange(size)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """uint8 [threads, size]."""
        number, places = self._places(addresses, size)
        if not self._written[number][places].all():
            raise Fault(f"{self._names[number]} is read where nothing was written")
        writer = self._writer[number][places]
        if ((writer != 0) & (writer != self.program)).any():
            raise Fault(f"{self._names[number]} is read where another program of the launch wrote")
        return self._bytes[number][places]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """uint8 [threads, size]; threads may write the same bytes, but not unlike ones."""
        number, places = self._places(addresses, values.shape[1])
        writer = self._writer[number][places]
        if ((writer != 0) & (writer != self.program)).any():
            raise Fault(f"two programs write the same byte of {self._names[number]}")
        self._bytes[number][places] = values
        if (self._bytes[number][places] != values).any():
            raise Fault(f"two threads write unlike values to {self._names[number]}")
        self._written[number][places] = True
        self._writer[number][places] = self.program

    def update(self, address: int, size: int, change: object) -> None:
        """An atomic operation of one thread on one number."""
        number, places = self._places(np.array([address], dtype=np.uint64), size)
        place = slice(int(places[0, 0]), int(places[0, -1]) + 1)
        if not self._written[number][place].all():
            raise Fault(f"{self._names[number]} is changed where nothing was written")
        self._bytes[number][place] = np.frombuffer(change(self._bytes[number][place].tobytes()), np.uint8)  # type: ignore[operator]


class Shared:
    """Shared memory of one program."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._bytes = np.zeros(nbytes, dtype=np.uint8)
        self._written = np.zeros(nbytes, dtype=bool)
        self._under_way = np.zeros(nbytes, dtype=bool)
        self._writer = np.full(nbytes, -1, dtype=np.int32)
        self._write_age = np.zeros(nbytes, dtype=np.int64)
        self._write_warp_age = np.zeros(nbytes, dtype=np.int64)
        self._reader = np.full(nbytes, -1, dtype=np.int32)
        """The thread that read it since the last barrier; several of a warp: -2 - warp; of more: -999."""
        self._read_age = np.zeros(nbytes, dtype=np.int64)
        self._read_warp_age = np.zeros(nbytes, dtype=np.int64)
        self.age = self.warp_age = 1
        """Barriers until now, of all threads, and of those of each warp."""
        self._uncommitted: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._groups: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []

    def barrier(self) -> None:
        """All threads have come here."""
        self.age += 1

    def warp_barrier(self) -> None:
        """All threads of each warp have come here."""
        self.warp_age += 1

    def _places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        at = addresses.astype(np.int64)
        if (at < 0).any() or (at + size > len(self._bytes)).any():
            raise Fault(f"byte {int(at.max())} and {size - 1} more of shared memory of {len(self._bytes)}")
        if (at % size).any():
            raise Fault(f"{size} bytes at a shared address that is no multiple of {size}")
        return at[:, None] + np.arange(size)

    def load(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """uint8 [threads, size]."""
        places = self._places(addresses, size)
        if self._under_way[places].any():
            raise Fault("shared memory is read while cp.async writes it")
        if not self._written[places].all():
            raise Fault("shared memory is read where nothing was written")
        mine = threads[:, None]
        if self._written_by_others(mine, places).any():
            raise Fault("shared memory is read that another thread wrote, with no barrier in between")
        order = np.argsort(places.reshape(-1), kind="stable")
        flat, by = places.reshape(-1)[order], np.repeat(threads, size)[order]
        self._note_readers(flat, by)
        return self._bytes[places]

    def _note_readers(self, places: np.ndarray, threads: np.ndarray) -> None:
        """Threads read bytes, in the bytes' order."""
        unlike = np.diff(places, append=-1) != 0
        first = np.flatnonzero(np.concatenate([[True], unlike[:-1]]))
        low, high = np.minimum.reduceat(threads, first), np.maximum.reduceat(threads, first)
        warp = np.where(low // _WARP == high // _WARP, -2 - low // _WARP, -999)
        now = np.where(low == high, low, warp)
        there = places[first]
        old = np.where(self._read_age[there] == self.age, self._reader[there], now)
        old_warp = np.where(old >= 0, -2 - old // _WARP, old)
        now_warp = np.where(now >= 0, -2 - now // _WARP, now)
        both = np.where(old_warp == now_warp, now_warp, -999)
        self._reader[there] = np.where(old == now, now, both)
        self._read_age[there] = self.age
        self._read_warp_age[there] = self.warp_age

    def _written_by_others(self, threads: np.ndarray, places: np.ndarray) -> np.ndarray:
        writer = self._writer[places]
        same_warp = writer // _WARP == threads // _WARP
        ordered = same_warp & (self._write_warp_age[places] < self.warp_age)
        return (writer != threads) & (self._write_age[places] == self.age) & ~ordered

    def _claim(self, threads: np.ndarray, places: np.ndarray) -> None:
        """Before a write."""
        if self._under_way[places].any():
            raise Fault("shared memory is written while cp.async writes it")
        mine = threads[:, None]
        reader = self._reader[places]
        warp = np.where(reader >= 0, reader // _WARP, -2 - reader)
        ordered = (warp == mine // _WARP) & (self._read_warp_age[places] < self.warp_age)
        if ((reader != mine) & (self._read_age[places] == self.age) & ~ordered).any():
            raise Fault("shared memory is overwritten that another thread reads, with no barrier in between")
        if self._written_by_others(mine, places).any():
            raise Fault("two threads write the same shared memory, with no barrier in between")

    def store(self, threads: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """uint8 [threads, size]; of threads that write the same bytes at once any one wins, if they agree."""
        places = self._places(addresses, values.shape[1])
        self._claim(threads, places)
        self._bytes[places] = values
        if (self._bytes[places] != values).any():
            raise Fault("two threads write unlike values to shared memory")
        self._written[places] = True
        self._writer[places] = threads[:, None]
        self._write_age[places] = self.age
        self._write_warp_age[places] = self.warp_age

    def copy(self, threads: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """cp.async: `values` will be there when its group is over."""
        places = self._places(addresses, values.shape[1])
        self._claim(threads, places)
        self._under_way[places] = True
        self._uncommitted.append((threads, places, values))

    def commit(self) -> None:
        """End a group of copies."""
        self._groups.append(self._uncommitted)
        self._uncommitted = []

    def wait(self, most: int) -> None:
        """Until at most so many groups are under way."""
        while len(self._groups) > most:
            for threads, places, values in self._groups.pop(0):
                self._under_way[places] = False
                self._bytes[places] = values
                self._written[places] = True
                self._writer[places] = threads[:, None]
                self._write_age[places] = self.age
                self._write_warp_age[places] = self.warp_age

    def end(self) -> None:
        """The program is over."""
        if any(self._groups) or self._uncommitted:
            raise Fault("the program ends while cp.async writes shared memory")
