"""Checkpoints of a tiny GPT as a trainer with its own loop writes and reads them: megatron.core alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any


def weights_of(gpt: Any) -> dict[str, Any]:
    """The sharded state dicts of all chunks."""
    return {f"model{n}": chunk.module.sharded_state_dict() for n, chunk in enumerate(gpt.chunks)}


def tree(gpt: Any) -> dict[str, Any]:
    """The model's and the optimizer's sharded state dicts; the optimizer has its states from here on."""
    models = weights_of(gpt)
    whole = models["model0"] if len(models) == 1 else models
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    return {
        **models,
        "optimizer": gpt.optimizer.sharded_state_dict(whole, is_loading=True, metadata=metadata),
    }


def write(gpt: Any, folder: Path, state: Any = tree, **options: Any) -> Any:
    """Save all of it, or its weights alone (`state=weights_of`). Call on all ranks."""
    import torch
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    return dist_checkpointing.save(state(gpt), str(folder), **options)


def read(gpt: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Load all of it, and put the weights back. Call on all ranks."""
    return read_parts(gpt, tree(gpt), folder, **options)


def read_weights_and_errors(gpt: Any, folder: Path) -> None:
    """Without the optimizer's state, which Megatron cannot give to another kind of optimizer."""
    from megatron_patch.megatron.checkpoint.dist_checkpointing import _saved, restore
    from megatron_patch.megatron.checkpoint.states import rank_state_of

    read_parts(gpt, weights_of(gpt), folder)
    restore(rank_state_of(gpt.chunks), folder, lambda: _saved(folder, "megatron_loco"), 7, 1.0)


def read_parts(gpt: Any, asked: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Load what is asked for, and put the weights back. Call on all ranks."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(asked, str(folder), **options)
    for number, chunk in enumerate(gpt.chunks):
        chunk.module.load_state_dict(state[f"model{number}"], strict=False)
    return state


def states_of(checkpoint: Path, name: str = "megatron_loco") -> dict[int, tuple[dict[str, Any], Any]]:
    """The manifest and the bytes (None: there are none) that every rank has saved."""
    import torch
    import torch.distributed.checkpoint as dcp

    legacy = sorted((checkpoint / "megatron_loco").glob("rank-*.pt"))
    if legacy:
        parts = [torch.load(path, weights_only=True) for path in legacy]
        return {rank: (json.loads(part["manifest"]), part["data"]) for rank, part in enumerate(parts)}
    reader = dcp.FileSystemReader(checkpoint)
    keys = reader.read_metadata().state_dict_metadata
    found = {}
    while (manifest := f"{name}.rank_{len(found)}.manifest/shard_0_1") in keys:
        key = f"{name}.rank_{len(found)}"
        state: dict[str, Any] = {manifest: io.BytesIO()}
        if key in keys:
            state[key] = torch.empty(keys[key].size, dtype=torch.uint8)
        dcp.load(state, storage_reader=reader, no_dist=True)
        text = state[manifest]
        if isinstance(text, io.BytesIO):
            text.seek(0)
            text = torch.load(text, weights_only=True)
        found[len(found)] = (json.loads(text[0] if isinstance(text, list) else text), state.get(key))
    return found
