"""The error states of Megatron's model chunks, as session/states.py wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.megatron.attach import attachment_of, chunks_of, session_of, use_default_method
from megatron_patch.megatron.seams.optimizer_step import loss_scale
from megatron_patch.session import states
from megatron_patch.session.states import RankOf, RankState


def rank_state_of(chunks: Sequence[Any], optimizer: Any = None) -> RankState:
    """Return the states of this rank's attached chunks, at least one, with `optimizer`'s default method."""
    if optimizer is not None:
        use_default_method(optimizer)
    attached = [attachment for chunk in chunks if (attachment := attachment_of(chunk)) is not None]
    # Parameters' names count layers from the first one of a chunk.
    numbers = (getattr(module, "layer_number", None) for chunk in chunks for module in chunk.modules())
    return RankState(attached, [number for number in numbers if isinstance(number, int)])


def compressed(chunks: Any) -> list[Any]:
    """Return those of the wrapped chunks whose gradients are compressed."""
    sessions = [
        (chunk, session_of(chunk)) for chunk in (chunks if isinstance(chunks, list | tuple) else [chunks])
    ]
    return [chunk for chunk, session in sessions if session is not None and session.config.compresses]


def state_dict(
    model: Any, optimizer: Any = None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """Call session.states.state_dict. fp16 needs `optimizer` for its loss scale, Muon for its method."""
    return states.state_dict(_rank_of(model, optimizer, "state_dict"), loss_scale(optimizer), reader, path)


def load_state_dict(model: Any, state: Mapping[str, Any], optimizer: Any = None) -> None:
    """Call session.states.load_state_dict; `optimizer` is needed as in `state_dict`."""
    states.load_state_dict(_rank_of(model, optimizer, "load_state_dict"), state, loss_scale(optimizer))


def _rank_of(model: Any, optimizer: Any, caller: str) -> RankOf | None:
    chunks = compressed(chunks_of(model, caller))
    if not chunks:
        return None
    if optimizer is None and getattr(chunks[0].config, "fp16", False):
        raise UserError("with fp16 errors carry the loss scale: pass the optimizer too, as second argument")
    return lambda _: rank_state_of(chunks, optimizer)
