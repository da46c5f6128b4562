"""megatron_patch.state_dict and load_state_dict for chunks of Megatron's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.megatron.attach import chunks_of, session_of
from megatron_patch.megatron.checkpoint.element_map import rank_state_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale
from megatron_patch.session import sharded_state
from megatron_patch.session.sharded_state import RankOf


def compressed(chunks: Any) -> list[Any]:
    """The DDP-wrapped chunks whose gradients leave in low bits."""
    found = []
    for chunk in chunks if isinstance(chunks, list | tuple) else [chunks]:
        state = session_of(chunk)
        if state is not None and state.config.compresses:
            found.append(chunk)
    return found


def state_dict(
    model: Any, optimizer: Any = None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """session.sharded_state.state_dict. With fp16 `optimizer` is needed: errors carry its loss scale."""
    rank_of = _rank_of(model, optimizer, "state_dict")
    return sharded_state.state_dict(rank_of, loss_scale(optimizer), reader, path)


def load_state_dict(model: Any, state: dict[str, Any], optimizer: Any = None) -> None:
    """session.sharded_state.load_state_dict."""
    sharded_state.load_state_dict(_rank_of(model, optimizer, "load_state_dict"), state, loss_scale(optimizer))


def _rank_of(model: Any, optimizer: Any, caller: str) -> RankOf | None:
    chunks = compressed(chunks_of(model, caller))
    if not chunks:
        return None
    if optimizer is None and getattr(chunks[0].config, "fp16", False):
        raise UserError("with fp16 errors carry the loss scale: pass the optimizer too, as second argument")
    return lambda _: rank_state_of(chunks)
