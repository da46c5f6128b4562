"""What a session keeps on its device from step to step, and its way to host memory and back.

For engines that give the device to something else between steps, as RL does to its rollouts. A tensor keeps
its identity and its views: its storage is emptied and filled again, as these engines do with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Memory:
    """The tensors that `sources` give, each time they are asked."""

    def __init__(self, *sources: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.sources = list(sources)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Storages that are empty, each with its bytes in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move all of it to host memory (pinned, from a GPU); what is there already stays there."""
        for storage in self._storages():
            if storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
                host.copy_(_bytes_of(storage))
                storage.resize_(0)
                self._away.append((storage, host))

    def bring_back(self) -> None:
        """Move it back, bit for bit; nothing where it is on the device."""
        while self._away:
            storage, host = self._away.pop()
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)

    def _storages(self) -> list[torch.UntypedStorage]:
        tensors = (tensor for source in self.sources for tensor in source())
        return list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
