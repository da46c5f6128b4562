"""The manifest of a checkpoint's error states: what it says of the job, and of every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_patch.session.layouts import RankLayout
from megatron_patch.session.rank_state import RankState


def content_of(rank: RankState, iteration: int, scale: float) -> dict[str, Any]:
    """What a manifest says of the whole job; `scale` is fp16's loss scale, the errors' unit."""
    counted = rank.states[0]
    for state in rank.states:
        state.end_unseen_step()  # a loop saves between steps, though nothing has told that one has ended
    return {
        "iteration": iteration,
        "config": rank.config.as_dict(),
        "groups": rank.groups,
        "world_size": dist.get_world_size(),
        "loss_scale": scale,
        "mid_step": any(state.in_step for state in rank.states),
        "steps": counted.steps,
        "steps_seen": counted.steps_seen,
        "events": dataclasses.asdict(counted.events),
        "phase": dataclasses.asdict(counted.phase),
        "onset": dataclasses.asdict(counted.onset),
    }


def gathered(layout: RankLayout, mine: Any) -> list[Any]:
    """From every rank `mine`, its layout and its positions, for `listed`. Call on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, layout.without_positions().as_json(), layout.positions))
    return everyone


def listed(files: Sequence[Any], everyone: Sequence[Any]) -> dict[str, Any]:
    """The layouts of all ranks for a manifest, each once; `files` says where each rank's tensors are."""
    layouts: list[Any] = []
    ranks = []
    for file, (_, layout, positions) in zip(files, everyone, strict=True):
        if layout not in layouts:
            layouts.append(layout)
        ranks.append({"file": file, "layout": layouts.index(layout), "positions": positions})
    return {"layouts": layouts, "ranks": ranks}


def layouts_in(manifest: Mapping[str, Any]) -> tuple[dict[int, RankLayout], set[int]]:
    """The layouts of `listed`, by rank, and the ranks that have tensors."""
    shared = [RankLayout.from_json(layout) for layout in manifest["layouts"]]
    ranks = dict(enumerate(manifest["ranks"]))
    layouts = {number: shared[rank["layout"]].at(rank["positions"]) for number, rank in ranks.items()}
    return layouts, {number for number, rank in ranks.items() if rank["file"]}
