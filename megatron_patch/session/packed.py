"""Manifests, and the error states of a rank packed into one tensor of bytes with the rank's own manifest.

Packing needs no collective, whereas session/sharded_state.py gathers one manifest of all ranks. Each rank
adds one tensor and one object to a checkpoint's metadata, however many senders there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.session.layouts import FORMAT, Damaged, RankLayout, RankState
from megatron_patch.session.reader import Reader

_ALIGNMENT = 8


def pack(rank: RankState, scale: float) -> tuple[str, torch.Tensor]:
    """Return this rank's manifest, and a copy of its tensors, uint8 on CPU; `scale` is fp16's loss scale."""
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
        **content_of(rank, rank.states[0].ledger.steps, scale),
        "layout": rank.layout.without_positions().as_json(),
        "positions": rank.layout.positions,
        "tensors": entries,
        "nbytes": size,
    }
    return json.dumps(manifest), data


class PackedReader(Reader):
    """Reads the states of a checkpoint in which each rank has a manifest.

    Args:
        rank: the state of this rank.
        ranks: the saved ranks of which the checkpoint has a manifest.
        manifest: returns a saved rank's manifest, as text.
        data: returns a saved rank's tensor of bytes, given its length.

    Raises:
        Damaged: no manifest can be read. If only some cannot be read, `apply` raises it.
    """

    def __init__(
        self,
        rank: RankState,
        ranks: Iterable[int],
        manifest: Callable[[int], str],
        data: Callable[[int, int], torch.Tensor],
    ) -> None:
        self._data = data
        here, layouts = dist.get_rank(), {}
        self._manifests: dict[int, dict[str, Any]] = {}
        problem: Damaged | None = None
        for saved in sorted(ranks, key=lambda saved: (saved != here, saved)):
            try:
                one = json.loads(manifest(saved))
                if one["format"] != FORMAT:
                    raise Damaged(f"it has format {one['format']!r}; this release reads {FORMAT}")
                layouts[saved] = RankLayout.from_json(one["layout"]).at(one["positions"])
                self._manifests[saved] = one
            except Damaged as error:
                problem = problem or error
            except (KeyError, TypeError, ValueError, IndexError) as error:
                problem = problem or Damaged(f"it holds what this release does not know: {error!r}")
            if layouts.get(here) == rank.layout and one["world_size"] == dist.get_world_size():
                break  # In the same layout a rank needs no other rank's manifest.
        else:
            worlds = [one["world_size"] for one in self._manifests.values()]
            gone = set(range(max(worlds, default=1))) - self._manifests.keys()
            if gone and problem is None:
                problem = Damaged(f"it has no error states of rank {min(gone)}")
        if not self._manifests:
            assert problem is not None
            raise problem
        stored = {saved for saved, one in self._manifests.items() if one["nbytes"]}
        super().__init__(rank, next(iter(self._manifests.values())), layouts, stored, problem)

    def tensors_of(self, saved_rank: int) -> _RankTensors:
        """Reader.tensors_of; reads all of them at once."""
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
        of_torch = getattr(torch, dtype)
        nbytes = math.prod(shape) * of_torch.itemsize
        return self._bytes[start : start + nbytes].clone().view(of_torch).view(shape)


def content_of(rank: RankState, iteration: int, scale: float) -> dict[str, Any]:
    """Return what a manifest says about the whole job; errors are multiplied by fp16's loss `scale`."""
    for state in rank.states:
        state.settle()  # A loop saves between steps, even if no optimizer's step was seen.
    counted, made_at = rank.states[0].ledger, rank.states[0].scale
    return {
        "iteration": iteration,
        "config": rank.config.as_dict(),
        "groups": rank.groups,
        "world_size": dist.get_world_size(),
        "loss_scale": scale if made_at is None else float(made_at),
        "mid_step": any(
            state.ledger.within_step and not state.ledger.sends_momentum for state in rank.states
        ),
        "steps": counted.steps,
        "steps_seen": counted.steps_seen,
        "events": dataclasses.asdict(counted.events),
        "phase": dataclasses.asdict(counted.phase),
        "onset": dataclasses.asdict(counted.onset),
    }


def gathered(layout: RankLayout, mine: Any) -> list[Any]:
    """Gather (`mine`, layout, positions) from every rank, for `listed`. All ranks must call it.

    Equal layouts are sent once, because each may name all ranks' pieces.
    """
    own = layout.without_positions().as_json()
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, digest, layout.positions))
    layouts: dict[str, Any] = {}
    for rank, (_, found, _) in enumerate(everyone):
        if found not in layouts:
            sent = [own]
            dist.broadcast_object_list(sent, src=rank)
            layouts[found] = sent[0]
    return [(theirs, layouts[found], positions) for theirs, found, positions in everyone]


def listed(files: Sequence[Any], everyone: Sequence[Any]) -> dict[str, Any]:
    """Return a manifest's layouts, without duplicates, and ranks; `files` says where a rank's tensors are."""
    layouts: list[Any] = []
    ranks = []
    for file, (_, layout, positions) in zip(files, everyone, strict=True):
        if layout not in layouts:
            layouts.append(layout)
        ranks.append({"file": file, "layout": layouts.index(layout), "positions": positions})
    return {"layouts": layouts, "ranks": ranks}


def layouts_in(manifest: Mapping[str, Any]) -> tuple[dict[int, RankLayout], set[int]]:
    """Return the layout of each rank in a manifest (see `listed`), and the ranks that have tensors."""
    shared = [RankLayout.from_json(layout) for layout in manifest["layouts"]]
    ranks = dict(enumerate(manifest["ranks"]))
    layouts = {number: shared[rank["layout"]].at(rank["positions"]) for number, rank in ranks.items()}
    return layouts, {number for number, rank in ranks.items() if rank["file"]}
