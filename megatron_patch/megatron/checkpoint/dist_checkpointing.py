"""Error states inside the checkpoints of megatron.core.dist_checkpointing, whoever writes them.

    sharded_state_dict of an optimizer   marks what it returns with the optimizer
    save                                 looks for marked dictionaries, and adds the states of the chunks
                                         that their optimizers update to what it writes
    load                                 after it, reads those states from the same folder

A rank writes a tensor of bytes, PREFIXmegatron_loco.rank_R, and an object, its manifest (session/packed.py).
PREFIX is what has been put before the optimizer's own keys since, which tells models of one checkpoint apart.
Neither function asks other ranks: some loops load on some ranks only. What is loaded without an optimizer, as
the weights of a reference model, leaves all states alone.
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
from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.attach import attached_chunks
from megatron_patch.megatron.checkpoint import old_folder
from megatron_patch.megatron.checkpoint.element_map import compressed, rank_state_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale, updates
from megatron_patch.session.layouts import Damaged, RankState
from megatron_patch.session.packed import PackedReader, pack
from megatron_patch.session.reader import Reader

logger = logging.getLogger(__name__)

_NAME = "megatron_loco"
_OURS = re.compile(rf"{_NAME}(_\d+)?\.rank_\d+")
_DEPTH = 4
"""Levels of a trainer's dictionary below which no optimizer's is looked for."""


class _OfOptimizer(dict[Any, Any]):
    """What an optimizer's sharded_state_dict has returned; its copies and pickles are plain dictionaries."""

    optimizer: Any
    first: tuple[Any, str] | None = None
    """One of its entries, and the key that it had."""

    @property
    def prefix(self) -> str:
        if self.first is None:
            return ""
        entry, key = self.first
        return str(entry.key).removesuffix(key) if entry.key.endswith(key) else ""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def install() -> None:
    """Replace `save`, `load` and the optimizers' sharded_state_dict; idempotent."""
    for path in symbols.SHARDED_STATES:
        patching.replace(path, _marking)  # a method: a partial would not be bound to its optimizer
    patching.wrap(symbols.CORE_SAVE, _save)
    patching.wrap(symbols.CORE_LOAD, _load)
    patching.wrap(symbols.SHARDED_METADATA, _without_ours)


def uninstall() -> None:
    """Give Megatron its own functions back."""
    paths = (*symbols.SHARDED_STATES, symbols.CORE_SAVE, symbols.CORE_LOAD, symbols.SHARDED_METADATA)
    patching.restore(*paths)


_depth = 0


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += 1
        try:
            found = original(optimizer, *args, **kwargs)
        finally:
            _depth -= 1
        if _depth or not isinstance(found, dict):
            return found
        marked = _OfOptimizer(found)
        marked.optimizer = optimizer
        entries = (entry for entry in nested_values(found) if isinstance(entry, ShardedBase))
        marked.first = next(((entry, str(entry.key)) for entry in entries), None)
        return marked

    return sharded_state_dict


def _without_ours(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a checkpoint holds, for comparisons with what is asked for."""
    found = original(*args, **kwargs)
    return {name: entry for name, entry in found.items() if not _OURS.search(str(entry.key))}


def _models(state: Any) -> Iterator[tuple[str, list[Any], _OfOptimizer, list[Any]]]:
    """For each model in a checkpoint: what its keys begin with, its chunks, the dictionary, and its place."""
    seen: set[int] = set()
    prefixes: dict[str, int] = {}
    for place, marked in _marked(state, []):
        chunks = [
            c for c in compressed(attached_chunks()) if updates(marked.optimizer, c) and id(c) not in seen
        ]
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
    for name, chunks, marked, _ in _models(state):
        key = f"{name}.rank_{here}"
        manifest, data = pack(rank_state_of(chunks), loss_scale(marked.optimizer))
        entries[f"{key}.manifest"] = ShardedObject(f"{key}.manifest", manifest, (1,), (0,))
        if data.numel():
            entries[key] = ShardedTensor.from_rank_offsets(key, data)
    if entries:
        bound.arguments["sharded_state_dict"] = {**state, **entries}
    return original(*bound.args, **bound.kwargs)


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    found = list(_models(bound.arguments["sharded_state_dict"]))
    result = original(*args, **kwargs)
    where, loaded = bound.arguments["checkpoint_dir"], result[0] if type(result) is tuple else result
    folder = Path(where)
    for name, chunks, marked, place in found:
        of_optimizer = functools.reduce(lambda value, key: value[key], place, loaded)
        rank, scale = rank_state_of(chunks), _scale(of_optimizer, marked)
        read = functools.partial(_reader, rank, where, name)
        restore(rank, folder, read, _steps_of(loaded, folder), scale)
    return result


def _steps_of(loaded: dict[str, Any], folder: Path) -> int:
    """The steps that a checkpoint without our states is from."""
    numbers = re.findall(r"\d+", folder.name)
    known = loaded.get("iteration", numbers[-1] if numbers else 0)
    return int(known) if isinstance(known, int | str) else 0


def _scale(state: Any, marked: _OfOptimizer) -> float:
    """The loss scale that has just been loaded: the optimizer takes it over later."""
    parts = [state, *state.values()] if isinstance(state, dict) else []
    for part in parts:
        scale = part.get("grad_scaler") if isinstance(part, dict) else None
        if isinstance(scale, dict) and "scale" in scale:
            return float(scale["scale"])
    return loss_scale(marked.optimizer)


def restore(
    rank: RankState, folder: Path, read: Callable[[], Reader | None], steps: int, scale: float
) -> None:
    """Put back what a checkpoint has of a model's states; says in one line how it went.

    Args:
        rank: the states of this rank.
        folder: the checkpoint's.
        read: what reads the states of this release; None where there are none.
        steps: the optimizer steps that a checkpoint without states is from.
        scale: the loss scale that has been loaded.

    Raises:
        UserError: a damaged state with `strict_load`.
    """
    rank.start_from_zero(steps)  # whatever is not found
    level = logging.INFO
    try:
        reader = old_folder.reader(rank, folder) or read()
        line = "errors start from zero: the checkpoint has none" if reader is None else reader.apply(scale)
    except Damaged as problem:
        for state in rank.states:
            state.clear_errors()  # of a part that was read; counters stay as those of the other ranks
        level, line = logging.WARNING, f"errors start from zero: {folder}: {problem}"
        if rank.config.strict_load:
            raise UserError(
                f"{folder}: {problem}; without compression.strict_load the errors would start from zero"
            ) from problem
    if dist.get_rank() == 0 or level != logging.INFO:
        logger.log(level, "megatron-loco: step %d: %s", rank.states[0].steps, line)


def _reader(rank: RankState, where: str | Path, name: str) -> PackedReader | None:
    """What reads a model's states; `where` is what Megatron was given: a folder or an object store."""
    storage = _get_filesystem_reader(where)
    try:
        keys = storage.read_metadata().state_dict_metadata
    except OSError:  # another format than torch_dist, which earlier releases of Megatron wrote
        return None

    def of(saved: int) -> str:
        return f"{name}.rank_{saved}"

    def manifest_key(saved: int) -> str:
        return ShardedObject(f"{of(saved)}.manifest", None, (1,), (0,)).unique_key

    def manifest(saved: int) -> str:
        text = {manifest_key(saved): io.BytesIO()}
        _read(text)
        return str(_unpickled(text[manifest_key(saved)]))

    def data(saved: int, nbytes: int) -> torch.Tensor:
        stored = keys.get(of(saved))
        if getattr(stored, "size", None) != torch.Size([nbytes]):
            raise Damaged(f"its error states of rank {saved} are missing or of another size")
        room = {of(saved): torch.empty(nbytes, dtype=torch.uint8, device="cpu")}
        _read(room)
        return room[of(saved)]

    def _read(state: dict[str, Any]) -> None:
        try:
            dcp.load(state, storage_reader=storage, no_dist=True)
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            cause = next((one for one, _ in getattr(error, "failures", {}).values()), error)
            first = str(cause).strip().partition("\n")[0].partition(". This is")[0]
            raise Damaged(f"its error states cannot be read: {first}") from error

    if not any(key.startswith(f"{name}.rank_") for key in keys):
        return None
    pattern = re.compile(rf"{re.escape(name)}\.rank_(\d+)\.manifest/")
    return PackedReader(
        rank, {int(found[1]) for key in keys if (found := pattern.match(key))}, manifest, data
    )


def _unpickled(value: Any) -> Any:
    """What a ShardedObject was saved as: a list of one, in a buffer where torch has not read it."""
    if isinstance(value, io.BytesIO):
        value.seek(0)
        value = torch.load(value, weights_only=True)
    return value[0] if isinstance(value, list) else value
