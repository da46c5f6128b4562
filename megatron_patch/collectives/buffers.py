"""Buffers for payloads on their way: taken, used and given back, so that a steady state allocates nothing."""

from __future__ import annotations

import torch


class BufferPool:
    """uint8 buffers, reused by shape and, on CUDA, by stream.

    A buffer goes to its next user without waiting for the last one's work, which is safe only on one and
    the same stream: expert and dense bucket groups may run on different ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._free: dict[tuple[int, int, int], list[torch.Tensor]] = {}

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
