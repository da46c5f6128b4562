"""Keeps error states in the checkpoints of megatron.core.dist_checkpointing, whichever loop writes them.

    sharded_state_dict of an optimizer   returns a dictionary that remembers the optimizer
    save                                 looks for these dictionaries, and also writes the error states of
                                         the chunks that their optimizers update
    load                                 runs Megatron's load, then reads those states from the same folder

A rank writes a tensor of bytes, PREFIXmegatron_loco.rank_R, and an object, its manifest (session/states.py).
PREFIX is what the caller has put before the optimizer's own keys, which distinguishes the models of one
checkpoint. Neither function communicates with other ranks, because some loops load on some ranks only. If a
model is loaded without an optimizer, as a reference model is, its error states are left alone.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from torch.distributed.checkpoint import CheckpointException

from megatron_patch.errors import UserError
from megatron_patch.megatron import outer_steps, patching, symbols
from megatron_patch.megatron.attach import attached_chunks, attachment_of, outer_steps_of
from megatron_patch.megatron.checkpoint.states import compressed, rank_state_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale, updates
from megatron_patch.session.states import Damaged, RankState, Saved, apply, pack

logger = logging.getLogger(__name__)

_NAME = "megatron_loco"
_OURS = re.compile(rf"{_NAME}(_\d+)?(_outer)?\.rank_\d+")
_DEPTH = 4
"""How many levels of a trainer's dictionary are searched for optimizers' dictionaries."""


class _OfOptimizer(dict[Any, Any]):
    """The result of an optimizer's sharded_state_dict; its copies and pickles are plain dictionaries."""

    optimizer: Any
    first: tuple[Any, str] | None = None
    """One of the dictionary's entries, and the key that it had when the optimizer returned it."""

    @property
    def prefix(self) -> str:
        if self.first is None:
            return ""
        entry, key = self.first
        return str(entry.key).removesuffix(key) if entry.key.endswith(key) else ""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def install() -> None:
    """Replace `save`, `load` and the optimizers' sharded_state_dict; a second call does nothing."""
    for path in symbols.SHARDED_STATES:
        patching.replace(path, _marking)  # A partial, as `wrap` sets, would not be bound to its optimizer.
    patching.wrap(symbols.CORE_SAVE, _save)
    patching.wrap(symbols.CORE_LOAD, _load)
    patching.wrap(symbols.SHARDED_METADATA, _without_ours)


def uninstall() -> None:
    """Restore Megatron's own functions."""
    paths = (*symbols.SHARDED_STATES, symbols.CORE_SAVE, symbols.CORE_LOAD, symbols.SHARDED_METADATA)
    patching.restore(*paths)


_depth = 0


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += 1
        try:
            state = original(optimizer, *args, **kwargs)
        finally:
            _depth -= 1
        if _depth or not isinstance(state, dict):
            return state
        marked = _OfOptimizer(state)
        marked.optimizer = optimizer
        entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedBase))
        marked.first = next(((entry, str(entry.key)) for entry in entries), None)
        return marked

    return sharded_state_dict


def _without_ours(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hide our entries from load_sharded_metadata, which Megatron compares with the requested entries."""
    entries = original(*args, **kwargs)
    return {name: entry for name, entry in entries.items() if not _OURS.search(str(entry.key))}


def _models(state: Any) -> Iterator[tuple[str, list[Any], _OfOptimizer, list[Any]]]:
    """Yield, for each model in a checkpoint, its keys' prefix, its chunks, its dictionary and its place."""
    seen: set[int] = set()
    prefixes: dict[str, int] = {}
    for place, marked in _marked(state, []):
        served = [c for c in attached_chunks() if compressed(c) or outer_steps_of([c])]
        chunks = [c for c in served if updates(marked.optimizer, c) and id(c) not in seen]
        if not chunks:
            continue
        seen |= {id(chunk) for chunk in chunks}
        number = prefixes[marked.prefix] = prefixes.get(marked.prefix, 0) + 1
        yield f"{marked.prefix}{_NAME}" + (f"_{number}" if number > 1 else ""), chunks, marked, place


def _marked(state: Any, place: list[Any]) -> Iterator[tuple[list[Any], _OfOptimizer]]:
    if isinstance(state, _OfOptimizer):
        yield place, state
    elif isinstance(state, dict | list) and len(place) < _DEPTH:
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _marked(value, [*place, key])


def _save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    state, here = bound.arguments["sharded_state_dict"], dist.get_rank()
    entries: dict[str, Any] = {}
    for attachment in map(attachment_of, attached_chunks()):
        if attachment is not None:  # On CUDA nothing else has looked at the last gather yet.
            attachment.weights.check()
    for name, chunks, marked, _ in _models(state):
        if outer := outer_steps_of(chunks):
            key = f"{name}_outer.rank_{here}"
            entries[key] = ShardedTensor.from_rank_offsets(key, outer_steps.packed(outer, marked.optimizer))
        if not (chunks := compressed(chunks)):
            continue
        key = f"{name}.rank_{here}"
        manifest, data = pack(rank_state_of(chunks, marked.optimizer), loss_scale(marked.optimizer))
        entries[f"{key}.manifest"] = ShardedObject(f"{key}.manifest", manifest, (1,), (0,))
        if data.numel():
            entries[key] = ShardedTensor.from_rank_offsets(key, data)
    if entries:
        bound.arguments["sharded_state_dict"] = {**state, **entries}
    return original(*bound.args, **bound.kwargs)


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    models = list(_models(bound.arguments["sharded_state_dict"]))
    result = original(*args, **kwargs)
    where, loaded = bound.arguments["checkpoint_dir"], result[0] if type(result) is tuple else result
    for name, chunks, marked, place in models:
        if outer := outer_steps_of(chunks):
            read_outer = functools.partial(_bytes, where, f"{name}_outer.rank_{dist.get_rank()}")
            outer_steps.restore(outer, read_outer, where)
        if not (chunks := compressed(chunks)):
            continue
        of_optimizer = functools.reduce(lambda value, key: value[key], place, loaded)
        rank, scale = rank_state_of(chunks, marked.optimizer), _scale(of_optimizer, marked)
        read = functools.partial(_saved, where, name)
        restore(rank, where, read, _steps_of(loaded, where), scale)
    return result


def _steps_of(loaded: dict[str, Any], where: str | Path) -> int:
    """Return the optimizer step of a checkpoint: its iteration, or the last number in its folder's name."""
    numbers = re.findall(r"\d+", Path(where).name)
    known = loaded.get("iteration", numbers[-1] if numbers else 0)
    return int(known) if isinstance(known, int | str) else 0


def _scale(state: Any, marked: _OfOptimizer) -> float:
    """Return the loss scale that was loaded, which the optimizer itself takes over later."""
    parts = [state, *state.values()] if isinstance(state, dict) else []
    for part in parts:
        scale = part.get("grad_scaler") if isinstance(part, dict) else None
        if isinstance(scale, dict) and "scale" in scale:
            return float(scale["scale"])
    return loss_scale(marked.optimizer)


def restore(
    rank: RankState, folder: str | Path, read: Callable[[], Saved | None], steps: int, scale: float
) -> None:
    """Restore a model's error states from a checkpoint, and log the outcome in one line.

    Args:
        rank: the states of this rank.
        folder: the folder of the checkpoint, or its address in an object store.
        read: returns the states in the checkpoint; None if it has none.
        steps: the optimizer step at which a checkpoint without states was written.
        scale: the loss scale that has been loaded.

    Raises:
        UserError: the states are damaged, and `strict_load` is set.
    """
    rank.start_from_zero(steps)  # States that are not found remain zero.
    level = logging.INFO
    try:
        saved = read()
        line = (
            "errors start from zero: the checkpoint has none" if saved is None else apply(rank, saved, scale)
        )
    except Damaged as problem:
        for session in rank.sessions:
            session.clear_errors()  # A part may have been read. Counters stay equal to the other ranks'.
        level, line = logging.WARNING, f"errors start from zero: {folder}: {problem}"
        if rank.config.strict_load:
            raise UserError(
                f"{folder}: {problem}; without compression.strict_load the errors would start from zero"
            ) from problem
    if rank.sessions[0].ledger.announces or level != logging.INFO:
        logger.log(level, "megatron-loco: step %d: %s", rank.sessions[0].ledger.steps, line)


def _bytes(where: str | Path, key: str) -> torch.Tensor | None:
    """Return a tensor of bytes of a checkpoint, or None if it has none of this name; it may raise Damaged."""
    storage = _get_filesystem_reader(where)
    try:
        stored = storage.read_metadata().state_dict_metadata.get(key)
    except OSError:
        return None
    if stored is None:
        return None
    room = {key: torch.empty(stored.size, dtype=torch.uint8, device="cpu")}
    _read(room, storage)
    return room[key]


def _read(state: dict[str, Any], storage: Any) -> None:
    try:
        dcp.load(state, storage_reader=storage, no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception.
        cause = next((failure for failure, _ in getattr(error, "failures", {}).values()), error)
        first = str(cause).strip().partition("\n")[0].partition(". This is")[0]
        raise Damaged(f"its error states cannot be read: {first}") from error


def _saved(where: str | Path, name: str) -> Saved | None:
    """Return a model's states in a checkpoint, or None. `where` is a folder or an object store."""
    storage = _get_filesystem_reader(where)
    try:
        metadata = storage.read_metadata()
    except OSError:  # Earlier releases of Megatron wrote other formats than torch_dist.
        return None
    keys = metadata.state_dict_metadata
    storage.read_metadata = lambda *_, **__: metadata  # Each dcp.load below would read the whole file again.

    def of(saved: int) -> str:
        return f"{name}.rank_{saved}"

    def manifest_key(saved: int) -> str:
        return ShardedObject(f"{of(saved)}.manifest", None, (1,), (0,)).unique_key

    def manifest(saved: int) -> str:
        text = {manifest_key(saved): io.BytesIO()}
        _read(text, storage)
        return str(_unpickled(text[manifest_key(saved)]))

    def data(saved: int) -> torch.Tensor:
        size = getattr(keys.get(of(saved)), "size", None)
        if size is None:
            raise Damaged(f"its error states of rank {saved} are missing")
        room = {of(saved): torch.empty(size, dtype=torch.uint8, device="cpu")}
        _read(room, storage)
        return room[of(saved)]

    if not any(key.startswith(f"{name}.rank_") for key in keys):
        return None
    pattern = re.compile(rf"{re.escape(name)}\.rank_(\d+)\.manifest/")
    return Saved({int(match[1]) for key in keys if (match := pattern.match(key))}, manifest, data)


def _unpickled(value: Any) -> Any:
    """Return the value of a ShardedObject, which is saved as a list of one and may still be pickled."""
    if isinstance(value, io.BytesIO):
        value.seek(0)
        value = torch.load(value, weights_only=True)  # noqa: TID251
    return value[0] if isinstance(value, list) else value
