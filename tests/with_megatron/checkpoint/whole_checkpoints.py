"""Checkpoints of a tiny GPT as a trainer with its own loop writes and reads them: megatron.core alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from coded_values import flat_error, set_error
from seeds import seeded
from with_megatron.gpt_model import build
from with_megatron.recording import weights
from with_megatron.seam_runs import attach, logged, session_of

import megatron_patch


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


def attached(parallel: dict[str, Any], compression: dict[str, Any]) -> tuple[Any, Any]:
    """In a worker: a tiny GPT with LoCo unless asked otherwise, and its first chunk's session."""
    gpt = build(**parallel)
    attach(gpt.chunks, compression)
    return gpt, session_of(gpt.chunks[0])


def senders_of(gpt: Any) -> list[Any]:
    """The senders that keep errors, of all chunks."""
    senders = [sender for chunk in gpt.chunks for sender in session_of(chunk).senders]
    return [sender for sender in senders if sender.error is not None]


def errors_of(gpt: Any) -> list[Any]:
    """This rank's errors, a copy for each sender."""
    return [flat_error(sender.error).clone() for sender in senders_of(gpt)]


def with_random_errors(gpt: Any, steps: int = 7) -> None:
    """Random errors after some steps; 1-bit Adam has switched after four of them."""
    generator = torch.Generator().manual_seed(seeded(100 * steps + torch.distributed.get_rank()))
    for chunk in gpt.chunks:
        ledger = session_of(chunk).ledger
        ledger.steps = ledger.steps_seen = steps
        if session_of(chunk).config.is_onebit_adam:
            ledger.phase.switch_step = ledger.phase.variance_steps = 4
    for sender in senders_of(gpt):
        values = torch.randn(sender.layout.numel, generator=generator)
        set_error(sender.error, values * torch.rand(values.shape, generator=generator) ** 4)


def save(folder: str, parallel: dict[str, Any], compression: dict[str, Any], state: Any = tree) -> Any:
    """In a worker: random errors, saved with the weights; returns the errors."""
    gpt, _ = attached(parallel, compression)
    with_random_errors(gpt)
    write(gpt, Path(folder, "iter_0000007"), state)
    return errors_of(gpt)


def load(
    folder: str, parallel: dict[str, Any], compression: dict[str, Any], weights_alone: bool = False
) -> tuple[Any, list[int], list[str]]:
    """In a worker: another model with the weights and errors; its errors, steps and log lines.

    1-bit Adam's steps are those of all, of the switch, and of the variance.
    """
    gpt, session = attached(parallel, compression)
    with logged() as lines:
        (read_weights_and_errors if weights_alone else read)(gpt, Path(folder, "iter_0000007"))
    steps = sorted({session_of(chunk).ledger.steps for chunk in gpt.chunks})
    if session.config.is_onebit_adam:
        assert session.active
        steps += [session.ledger.phase.switch_step, session.ledger.phase.variance_steps]
    return errors_of(gpt), steps, lines


def save_apart(model: Any, folder: Path, optimizer: Any = None) -> None:
    """`state_dict`, saved by torch.distributed.checkpoint."""
    dcp.save({"compression": megatron_patch.state_dict(model, optimizer)}, checkpoint_id=folder)


def load_apart(model: Any, folder: Path, optimizer: Any = None, any_layout: bool = True) -> None:
    """`load_state_dict`; without `any_layout` the checkpoint is of the same one."""
    reader = dcp.FileSystemReader(folder)
    state = megatron_patch.state_dict(model, optimizer, reader if any_layout else None)
    dcp.load({"compression": state}, storage_reader=reader)
    megatron_patch.load_state_dict(model, state, optimizer)


def interrupted(folder: str, model: dict[str, Any], options: dict[str, Any], how: str) -> dict[str, Any]:
    """In a worker: 8 steps' weights; `how` says what happens to the errors after the fourth."""
    gpt = build(**model)
    config = megatron_patch.CompressionConfig(**options)
    optimizer = gpt.optimizer if model.get("dtype") == "fp16" or "muon" in model else None
    megatron_patch.attach(gpt.chunks, config)
    for step in range(8):
        if step == 4 and how != "whole":
            save_apart(gpt.chunks, Path(folder), optimizer)
            megatron_patch.disable()
            megatron_patch.attach(gpt.chunks, config)
            if how != "forgotten":
                load_apart(gpt.chunks, Path(folder), optimizer, any_layout=how == "by reader")
        gpt.step(step)
    gpt.gather()
    return weights(gpt) | {"steps": [session_of(chunk).ledger.steps for chunk in gpt.chunks]}


def states_of(checkpoint: Path, name: str = "megatron_loco") -> dict[int, tuple[dict[str, Any], Any]]:
    """The manifest and the bytes (None: there are none) that every rank has saved."""
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
