"""Moves the tensors that a session keeps between steps from the device to host memory and back.

This is for engines that use the device for something else between steps, such as the rollouts of RL. Tensors
and their views stay valid: their storage is resized to 0 and back, as these engines do with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Memory:
    """The tensors that `sources` return; they are called anew for each operation."""

    def __init__(self, *sources: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.sources = list(sources)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """The storages that are offloaded, each with its bytes in host memory."""

    @property
    def nbytes(self) -> int:
        """The bytes that the tensors take on the device now."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move all tensors to host memory, which is pinned for a GPU; offloaded ones stay there."""
        for storage in self._storages():
            if storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
                host.copy_(_bytes_of(storage))
                storage.resize_(0)
                self._away.append((storage, host))

    def bring_back(self) -> None:
        """Move offloaded tensors back to the device, bit for bit."""
        while self._away:
            storage, host = self._away.pop()
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)

    def _storages(self) -> list[torch.UntypedStorage]:
        tensors = (tensor for source in self.sources for tensor in source())
        return list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
