"""The error states as a state dict of torch.distributed.checkpoint, for trainers with their own checkpoints.

    state = state_dict(model)                          every rank: its own tensors, and a manifest of all
    dcp.save({"compression": state}, checkpoint_id=PATH)

    state = state_dict(model, reader=dcp.FileSystemReader(PATH))     room for what this rank needs of it
    dcp.load({"compression": state}, checkpoint_id=PATH)
    load_state_dict(model, state)

Keys carry the rank that saved them, so no two ranks write the same one. What a rank needs of a checkpoint is
named by its manifest: its own tensors under the same layout, under another one those of all old ranks that
held its parameters. The manifest is text, the same on all ranks.
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
"""Makes the state of this rank, of the tensors that a checkpoint's buckets hold, by their keys (none: of what
is there). All ranks call it."""


def state_dict(
    rank_of: RankOf | None, scale: float, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """What a model remembers, as copies on the CPU. Call on all ranks.

    Args:
        rank_of: makes this rank's state; None where this rank has none.
        scale: fp16's loss scale, the errors' unit; 1.0 without one.
        reader: a dcp.StorageReader of a checkpoint to load: what is returned has room for what this rank
            needs of it, in whatever layout it was saved.
        path: the keys under which the reader's checkpoint has this model's state, joined by dots. It need
            not be given where the checkpoint has the state of one model only.

    Raises:
        UserError: there is no such state in the reader's checkpoint, or several, or it is damaged.
    """
    if rank_of is None:
        if reader is None:
            gathered(RankLayout(()), False)  # other ranks may have some, and ask all
        return {}
    if reader is not None:
        return _room_for(rank_of, reader, path)
    rank = rank_of(())
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rank.tensors()}
    everyone = gathered(rank.layout, bool(tensors))
    content = content_of(rank, rank.states[0].steps, scale)
    manifest = {"format": FORMAT, **content, **listed([mine for mine, *_ in everyone], everyone)}
    here = f"{_RANK}{dist.get_rank()}."
    return {MANIFEST: json.dumps(manifest)} | {here + name: tensor for name, tensor in tensors.items()}


def load_state_dict(rank_of: RankOf | None, state: dict[str, Any], scale: float) -> None:
    """Put back what dcp.load has filled in; says in one line what happened. Call on all ranks.

    Raises:
        UserError: no state of `state_dict`, or one that is damaged.
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
        logger.info("megatron-loco: step %d: %s", reader.rank.states[0].steps, line)


class _StateReader(Reader):
    """Reads from a loaded state dict."""

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
    """The keys of the tensors that each bucket of a manifest holds, each set once."""
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
    """What the keys of a model's state begin with in a checkpoint."""
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
