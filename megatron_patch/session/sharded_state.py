"""The error states as a state dict of torch.distributed.checkpoint, for trainers with their own checkpoints.

    state = state_dict(model)                          this rank's tensors, and a manifest of all ranks
    dcp.save({"compression": state}, checkpoint_id=PATH)

    state = state_dict(model, reader=dcp.FileSystemReader(PATH))     empty tensors for what this rank needs
    dcp.load({"compression": state}, checkpoint_id=PATH)
    load_state_dict(model, state)

Keys have the number of the rank that saved them, so that no two ranks write the same key. The manifest is
text, the same on all ranks, and names what a rank needs: its own tensors in the same layout, or in another
layout the tensors of all saved ranks that held its parameters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_patch.errors import UserError
from megatron_patch.files import load_json
from megatron_patch.session.layouts import FORMAT, Damaged, RankLayout, RankState
from megatron_patch.session.packed import content_of, gathered, layouts_in, listed
from megatron_patch.session.reader import Reader

logger = logging.getLogger(__name__)

MANIFEST = "megatron_loco_manifest"
_RANK = "megatron_loco_rank_"

RankOf = Callable[[Sequence[Sequence[str]]], RankState]
"""Makes this rank's RankState. Its argument is the keys of the tensors in each of a checkpoint's buckets, for
which exchanges are made first; it may be empty. All ranks call it."""


def state_dict(
    rank_of: RankOf | None, scale: float, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """Return a model's error states and counters, as copies on the CPU. All ranks must call it.

    Args:
        rank_of: makes this rank's state; None if this rank has none.
        scale: fp16's loss scale, which errors are multiplied by; 1.0 without one.
        reader: a dcp.StorageReader of a checkpoint to load: the result then has empty tensors for what this
            rank needs of the checkpoint, whatever layout it was saved in.
        path: the keys of this model's state in the reader's checkpoint, joined by dots. It may be left out
            if the checkpoint has the state of only one model.

    Raises:
        UserError: the reader's checkpoint has no such state, or several, or it is damaged.
    """
    if rank_of is None:
        if reader is None:
            gathered(RankLayout(()), False)  # Ranks that have a state gather from all ranks.
        return {}
    if reader is not None:
        return _room_for(rank_of, reader, path)
    rank = rank_of(())
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rank.tensors()}
    everyone = gathered(rank.layout, bool(tensors))
    content = content_of(rank, rank.states[0].ledger.steps, scale)
    manifest = {"format": FORMAT, **content, **listed([mine for mine, *_ in everyone], everyone)}
    here = f"{_RANK}{dist.get_rank()}."
    return {MANIFEST: json.dumps(manifest)} | {here + name: tensor for name, tensor in tensors.items()}


def load_state_dict(rank_of: RankOf | None, state: dict[str, Any], scale: float) -> None:
    """Restore a state that dcp.load has filled in, and log what happened. All ranks must call it.

    Raises:
        UserError: `state` does not come from `state_dict`, or is damaged.
    """
    if rank_of is None:
        return
    reader = _reader_of(rank_of, state)
    reader.rank.start_from_zero(0)
    try:
        line = reader.apply(scale)
    except Damaged as problem:
        raise UserError(f"the state of megatron_patch.state_dict cannot be read: {problem}") from problem
    if dist.get_rank() == 0:
        logger.info("megatron-loco: step %d: %s", reader.rank.states[0].ledger.steps, line)


class _StateReader(Reader):
    """Reads saved states from a state dict that dcp.load has filled in."""

    def __init__(self, rank: RankState, manifest: dict[str, Any], state: dict[str, Any]) -> None:
        super().__init__(rank, manifest, *layouts_in(manifest))
        self._state = state

    def tensors_of(self, saved_rank: int) -> _RankPart:
        return _RankPart(self._state, f"{_RANK}{saved_rank}.")


class _RankPart:
    def __init__(self, state: dict[str, Any], prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def of(self, state: int) -> dict[str, torch.Tensor]:
        prefix = f"{self._prefix}{state}."
        found = {
            key.removeprefix(prefix): tensor for key, tensor in self._state.items() if key.startswith(prefix)
        }
        if not found:
            raise UserError(
                f"the state of megatron_patch.state_dict has no {prefix}*: to load another layout's "
                "checkpoint, make it with state_dict(model, reader=...)"
            )
        return found


def _reader_of(rank_of: RankOf, state: dict[str, Any]) -> _StateReader:
    text = state.get(MANIFEST)
    if not isinstance(text, str):
        raise UserError(f"this is no state of megatron_patch.state_dict: it has no {MANIFEST}")
    try:
        manifest = load_json(text)
        if manifest["format"] != FORMAT:
            raise Damaged(f"it has format {manifest['format']}; this release reads {FORMAT}")
        return _StateReader(rank_of(_sets(manifest)), manifest, state)
    except (ValueError, KeyError, TypeError, Damaged) as error:
        raise UserError(f"the state of megatron_patch.state_dict cannot be read: {error}") from error


def _sets(manifest: dict[str, Any]) -> list[list[str]]:
    """Return the keys of the tensors in each bucket of a manifest, without duplicates."""
    buckets = [bucket for layout in manifest["layouts"] for bucket in layout["buckets"]]
    keys = [list(dict.fromkeys(str(piece["key"]) for piece in bucket["pieces"])) for bucket in buckets]
    return [list(one) for one in dict.fromkeys(map(tuple, keys))]


def _room_for(rank_of: RankOf, reader: Any, path: str | None) -> dict[str, Any]:
    metadata = reader.read_metadata()
    prefix = _prefix_in(metadata, path)
    state: dict[str, Any] = {prefix + MANIFEST: ""}
    dcp.load(state, storage_reader=reader, no_dist=True)
    found = _reader_of(rank_of, {MANIFEST: state.pop(prefix + MANIFEST)})
    ranks = found.overlapping() if found.mine is None else [found.mine]
    room: dict[str, Any] = {MANIFEST: ""}
    for key, stored in metadata.state_dict_metadata.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else ""
        if isinstance(stored, TensorStorageMetadata) and any(name.startswith(f"{_RANK}{r}.") for r in ranks):
            room[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    return room


def _prefix_in(metadata: Metadata, path: str | None) -> str:
    """Return the prefix of the keys of a model's state in a checkpoint; UserError if it is not clear."""
    keys = metadata.state_dict_metadata
    found = sorted(key.removesuffix(MANIFEST) for key in keys if key.endswith(MANIFEST))
    if not found:
        raise UserError(
            "the checkpoint holds no state of megatron_patch.state_dict; without load_state_dict errors "
            "start from zero"
        )
    shown = ", ".join(repr(prefix.removesuffix(".")) for prefix in found)
    if path is None and len(found) > 1:
        raise UserError(
            f"the checkpoint holds the states of several models, at {shown}: name one: "
            "state_dict(model, reader=..., path=...)"
        )
    prefix = found[0] if path is None else f"{path}." if path else ""
    if prefix not in found:
        raise UserError(
            f"the checkpoint holds no state of megatron_patch.state_dict at {path!r}, only at {shown}"
        )
    return prefix
