"""The manifest of a checkpoint's error states: how it is made, and what one may say.

It is looked at before anything is made of it, since another user may have written it.

Its checksum says that it is whole, not that its writer meant well. A number of elements that its files cannot
hold would ask for memory without end, and a position outside of its bucket for other elements' errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_patch.compensation.resharding import ALL_REDUCE, NODE_SUM, OWNER, REDUCE_SCATTER
from megatron_patch.session.events import Events
from megatron_patch.session.layouts import RankLayout
from megatron_patch.session.onset import Onset, Phase
from megatron_patch.session.rank_state import RankState

_KINDS = (REDUCE_SCATTER, NODE_SUM, ALL_REDUCE, OWNER)
_MOST = 1 << 62


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


def rank_file_name(rank: int) -> str:
    """The name of a rank's file in the folder."""
    return f"rank-{rank:05d}.safetensors"


def check_manifest(manifest: Any) -> None:
    """Look at all of it.

    Raises:
        ValueError: a key is missing, a value is of another kind, or a size is impossible.
    """
    _mapping(manifest, "the manifest")
    for key in ("iteration", "steps", "steps_seen"):
        _count(manifest.get(key), key)
    _need(isinstance(manifest.get("mid_step"), bool), "mid_step")
    _need(_number(manifest.get("loss_scale")) and manifest["loss_scale"] > 0, "loss_scale")
    config = _mapping(manifest.get("config"), "config")
    _need(isinstance(config.get("method"), str) and isinstance(config.get("save_error"), bool), "config")
    beta = config.get("error_beta", 0.0)
    _need(_number(beta) and 0 <= beta < 1, "config: error_beta")
    events = _mapping(manifest.get("events"), "events")
    _need(events.keys() <= {field.name for field in dataclasses.fields(Events)}, "events")
    for value in events.values():
        _count(value, "events")
    groups = _mapping(manifest.get("groups"), "groups")
    for value in groups.values():
        _count(value, "groups", 1)
    _phase(_mapping(manifest.get("phase", {}), "phase"))
    _onset(_mapping(manifest.get("onset", {}), "onset"))
    layouts = [_layout(layout) for layout in _list(manifest.get("layouts"), "layouts")]
    ranks = _list(manifest.get("ranks"), "ranks")
    stored = [_file(_mapping(rank, "ranks"), number) for number, rank in enumerate(ranks)]
    for rank, nbytes in zip(ranks, stored, strict=True):
        _count(rank.get("layout"), "ranks: layout")
        _need(rank["layout"] < len(layouts), "ranks: layout")
        _rank(layouts[rank["layout"]], rank.get("positions"), nbytes, sum(filter(None, stored)))


def _phase(phase: Mapping[str, Any]) -> None:
    _need(phase.keys() <= {field.name for field in dataclasses.fields(Phase)}, "phase")
    for key in ("switch_step", "variance_steps"):
        if phase.get(key) is not None:
            _count(phase[key], f"phase: {key}")
    _count(phase.get("warm_up_from", 0), "phase: warm_up_from")
    numbers = [*_list(phase.get("norms", []), "phase: norms"), phase.get("learning_rate", 0.0)]
    _need(all(map(_number, numbers)), "phase")


def _onset(onset: Mapping[str, Any]) -> None:
    _need(onset.keys() <= {field.name for field in dataclasses.fields(Onset)}, "onset")
    for key in ("started", "moves", "dropped"):
        _need(isinstance(onset.get(key, False), bool), f"onset: {key}")
    for key in ("still", "longest", "since"):
        _count(onset.get(key) or 0, f"onset: {key}")
    for rates in _list(onset.get("rates", []), "onset: rates"):
        _need(all(map(_number, rates if isinstance(rates, list) else [rates])), "onset: rates")


def _file(rank: Mapping[str, Any], number: int) -> int | None:
    """Bytes of the rank's file; None where that is not known (a state dict), 0 where it has none."""
    file = rank.get("file")
    if file is None or isinstance(file, bool):
        return None if file else 0
    _need(_mapping(file, "ranks: file").keys() == {"file", "nbytes", "sha256"}, "ranks: file")
    _need(file["file"] == rank_file_name(number) and isinstance(file["sha256"], str), "ranks: file")
    return _count(file["nbytes"], "ranks: file")


def _layout(layout: Any) -> tuple[list[Any], list[Any]]:
    """The buckets and the states of a layout."""
    buckets = _list(_mapping(layout, "layouts").get("buckets"), "buckets")
    for bucket in buckets:
        numel = _count(_mapping(bucket, "buckets").get("numel"), "buckets: numel")
        for piece in _list(bucket.get("pieces"), "pieces"):
            _piece(_mapping(piece, "pieces"), numel)
        for span in _list(bucket.get("spans", []), "spans"):
            _need(len(_list(span, "spans")) == 4 and isinstance(span[3], bool), "spans")
            start, length, row = (_count(value, "spans") for value in span[:3])
            _need(start + length <= numel and 1 <= row <= max(length, 1), "spans")
        _need(sum(span[1] for span in bucket.get("spans", [])) <= numel, "spans")
    states = _list(layout.get("states"), "states")
    for state in states:
        _state(_mapping(state, "states"), len(buckets))
    return buckets, states


def _piece(piece: Mapping[str, Any], numel: int) -> None:
    _need(piece.keys() == {"name", "key", "offset", "shape", "start", "strides"}, "pieces")
    _need(isinstance(piece["name"], str) and isinstance(piece["key"], str), "pieces")
    axes = [_list(piece[key], "pieces") for key in ("offset", "shape", "strides")]
    _need(len({len(values) for values in axes}) == 1, "pieces")
    for values in axes:
        for value in values:
            _count(value, "pieces")
    last = _count(piece["start"], "pieces")
    last += sum((size - 1) * stride for size, stride in zip(axes[1], axes[2], strict=True))
    _need(0 in piece["shape"] or last < numel, "pieces")
    _need(math.prod(piece["shape"]) <= numel, "pieces")


def _state(state: Mapping[str, Any], buckets: int) -> None:
    known = {"kind", "bucket", "senders", "weight", "shards", "shard_size", "block", "dtype", "blocks"}
    _need(known - {"blocks"} <= state.keys() <= known | {"rotated"}, "states")
    _need(state["kind"] in _KINDS and state["dtype"] in (None, "int8", "bf16", "fp32"), "states")
    _need(_count(state["bucket"], "states: bucket") < buckets, "states: bucket")
    for key, least in (("senders", 1), ("shards", 1), ("shard_size", 0), ("block", 1)):
        _count(state[key], f"states: {key}", least)
    _need(_number(state["weight"]) and 1e-12 <= state["weight"] <= 1, "states: weight")
    if state.get("blocks") is not None:
        _count(state["blocks"], "states: blocks")
    rotated = state.get("rotated", False)
    _need(isinstance(rotated, bool), "states: rotated")
    _need(not rotated or (state["block"] >= 16 and state["block"] & (state["block"] - 1) == 0), "states")


def _rank(layout: tuple[list[Any], list[Any]], positions: Any, nbytes: int | None, every: int) -> None:
    """Where the rank's states lie in their buckets; `nbytes` is its file's size, `every` all files'."""
    buckets, states = layout
    _need(len(_list(positions, "positions")) == len(states), "positions")
    for position, state in zip(positions, states, strict=True):
        _need(len(_list(position, "positions")) == 5, "positions")
        start, length, rows, stride, index = (_count(value, "positions") for value in position)
        bucket = buckets[state["bucket"]]["numel"]
        _need(rows >= 1 and start + (rows - 1) * stride + length <= bucket, "positions")
        _need(index < state["senders"], "positions: index")
        shards, size = state["shards"], state["shard_size"]
        _need(rows * length <= shards * size, "states: shard_size")
        if state["dtype"] is None or not nbytes:
            continue
        # An error takes a byte an element and more, and all files together hold the bucket.
        _need(shards * max(size, 1) <= nbytes and bucket <= every, "the number of elements")
        _need((state.get("blocks") or 0) <= max(size, 1), "states: blocks")


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{what} is not as a save writes it")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no mapping")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list")
    return value


def _count(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise ValueError(f"{what}: {str(value)[:40]} is no whole number, {least} or more")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
