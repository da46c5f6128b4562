"""A rank's error states as one tensor of bytes and a manifest of its own, written without a collective.

A checkpoint's metadata grows by one tensor and one object a rank, however many senders there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.session.layouts import FORMAT, Damaged, RankLayout
from megatron_patch.session.manifest import content_of
from megatron_patch.session.rank_state import RankState
from megatron_patch.session.reader import Reader

_ALIGNMENT = 8


def pack(rank: RankState, scale: float) -> tuple[str, torch.Tensor]:
    """This rank's manifest, and a copy of its tensors, uint8 on the CPU; `scale` is fp16's loss scale."""
    tensors, entries, size = dict(rank.tensors()), {}, 0
    for name, tensor in tensors.items():
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]
        size = start + tensor.nbytes
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        data[entries[name][2] :][: flat.numel()].copy_(flat)
    manifest = {
        "format": FORMAT,
        **content_of(rank, rank.states[0].steps, scale),
        "layout": rank.layout.without_positions().as_json(),
        "positions": rank.layout.positions,
        "tensors": entries,
        "nbytes": size,
    }
    return json.dumps(manifest), data


class PackedReader(Reader):
    """Reads the states of a checkpoint's ranks, of which each has a manifest.

    Args:
        rank: the state of this rank.
        has: whether the checkpoint has a manifest of a rank.
        manifest: that manifest, as text; KeyError where there is none.
        data: gives a saved rank's tensor of so many bytes.
        where: the checkpoint, for messages.

    Raises:
        Damaged: a manifest is missing, or holds what this release does not know.
    """

    def __init__(
        self,
        rank: RankState,
        has: Callable[[int], bool],
        manifest: Callable[[int], str],
        data: Callable[[int, int], torch.Tensor],
        where: Any,
    ) -> None:
        self._data = data
        here, layouts = dist.get_rank(), {}
        self._manifests: dict[int, dict[str, Any]] = {}

        def read(saved: int) -> dict[str, Any]:
            one = self._manifests[saved] = json.loads(manifest(saved))
            layouts[saved] = RankLayout.from_json(one["layout"]).at(one["positions"])
            return one

        try:
            world = read(here if has(here) else 0)["world_size"]
            # Under the same layout a rank needs to know of no other.
            if world != dist.get_world_size() or layouts.get(here) != rank.layout:
                for saved in set(range(world)) - self._manifests.keys():
                    read(saved)
            stored = {saved for saved, one in self._manifests.items() if one["nbytes"]}
            content = next(iter(self._manifests.values()))
            if content["format"] != FORMAT:
                raise Damaged(f"{where} has format {content['format']!r}; this release reads {FORMAT}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Damaged(f"{where} holds what this release does not know: {error!r}") from error
        super().__init__(rank, content, layouts, stored)

    def tensors_of(self, saved_rank: int) -> _RankTensors:
        """Reads them all: a rank's tensors lie together."""
        one = self._manifests[saved_rank]
        return _RankTensors(one["tensors"], self._data(saved_rank, one["nbytes"]))


class _RankTensors:
    def __init__(self, entries: Mapping[str, Any], data: torch.Tensor) -> None:
        self._entries, self._bytes = entries, data

    def of(self, state: int) -> dict[str, torch.Tensor]:
        prefix = f"{state}."
        return {
            name.removeprefix(prefix): self._one(*entry)
            for name, entry in self._entries.items()
            if name.startswith(prefix)
        }

    def _one(self, dtype: str, shape: list[int], start: int) -> torch.Tensor:
        of = getattr(torch, dtype)
        nbytes = math.prod(shape) * of.itemsize
        # A copy: torch reads a generator's state from the beginning of the tensor's storage.
        return self._bytes[start : start + nbytes].clone().view(of).view(shape)
