"""Maps each error state of a rank to elements of the whole model; state_dict and load_state_dict use it.

A checkpoint may be loaded under another parallelism or bucket size, so a saved error must say where its
elements lie in the whole model. A module's `sharded_state_dict` says for every parameter which box of which
global tensor this rank holds (megatron.core.dist_checkpointing.mapping.ShardedTensor).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_patch.collectives.sender import Sender
from megatron_patch.errors import UserError
from megatron_patch.megatron.attach import Attachment, attachment_of, chunks_of, session_of
from megatron_patch.megatron.seams.gradients import BucketGroupSeam, contents_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale
from megatron_patch.session import sharded_state
from megatron_patch.session.layouts import RankState
from megatron_patch.session.resharding import Part, Piece
from megatron_patch.session.sharded_state import RankOf


def rank_state_of(chunks: Sequence[Any]) -> RankState:
    """Return the error states and counters of this rank's attached chunks, of which there must be one."""
    attached = [(chunk, attachment) for chunk in chunks if (attachment := attachment_of(chunk)) is not None]
    chunk, attachment = attached[0]
    groups = _groups(chunk) if isinstance(attachment, Attachment) else attachment.ranks()

    def forget() -> None:
        for seam in (seam for _, attachment in attached for seam in attachment.seams):
            if seam.momentum is not None:
                seam.momentum.held = None  # The next step takes it from Adam's state.

    found = [pair for chunk, attachment in attached for pair in parts_of(chunk, attachment)]
    return RankState(found, [attachment.state for _, attachment in attached], groups, forget)


def _groups(chunk: Any) -> dict[str, int]:
    pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
    return {
        "tensor": chunk.tp_group.size(),
        "pipeline": pipeline.size(),
        "expert": chunk.ep_group.size(),
        "data": chunk.dp_cp_group.size(),
        "instances": chunk.ddp_config.num_distributed_optimizer_instances,
    }


def parts_of(chunk: Any, attachment: Any) -> list[tuple[Sender, Part]]:
    """Return every sender of an attached chunk, and which elements its error state is for."""
    if not isinstance(attachment, Attachment):
        return list(attachment.parts())
    pieces = _pieces_of_parameters(chunk)
    return [found for seam in attachment.seams for found in _parts_of_group(seam, pieces)]


def _parts_of_group(
    seam: BucketGroupSeam, pieces: dict[torch.nn.Parameter, tuple[Piece, ...]]
) -> Iterator[tuple[Sender, Part]]:
    buckets = seam.group.buckets
    placed = [
        tuple(
            dataclasses.replace(piece, start=piece.start + start)
            for parameter, (start, _) in bucket.param_to_index.items()
            for piece in pieces[parameter]
        )
        for bucket in buckets
    ]
    spans = [contents_of(bucket, seam.momentum is not None).spans or () for bucket in buckets]
    for stage in seam.stages:
        for place, exchange in enumerate(stage.made.exchanges):
            first = stage.shard * stage.contents[place].numel
            for state in exchange.states():
                part = Part(
                    state.kind,
                    placed[place],
                    buckets[place].grad_data.numel(),
                    dataclasses.replace(state.position, start=first + state.position.start),
                    stage.copy * state.senders + state.index,
                    stage.copies * state.senders,
                    1 / (stage.copies * state.ranks) if stage.averages else 1.0,
                    () if state.sender.layout.by_shard else spans[place],
                )
                yield state.sender, part


def _pieces_of_parameters(chunk: Any) -> dict[torch.nn.Parameter, tuple[Piece, ...]]:
    """Return each parameter's pieces, whose `start` is counted from the parameter's first element."""
    names = {parameter: name for name, parameter in chunk.module.named_parameters()}
    parameters = {id(parameter): parameter for parameter in names}
    pieces: dict[torch.nn.Parameter, tuple[Piece, ...]] = {}
    for entry in nested_values(_sharded_state_dict(chunk)):
        parameter = parameters.get(id(getattr(entry, "data", None)))
        if parameter is not None and isinstance(entry, ShardedTensor | ShardedTensorFactory):
            pieces[parameter] = tuple(_pieces(names[parameter], parameter, entry))
    for parameter, name in names.items():
        pieces.setdefault(parameter, (_local_piece(chunk, name, parameter),))
    return pieces


def _sharded_state_dict(chunk: Any) -> dict[str, Any]:
    if not hasattr(chunk.module, "sharded_state_dict"):
        return {}
    found: dict[str, Any] = chunk.module.sharded_state_dict(metadata={"dp_cp_group": chunk.dp_cp_group})
    return found


def _pieces(
    name: str, parameter: torch.nn.Parameter, entry: ShardedTensor | ShardedTensorFactory
) -> Iterator[Piece]:
    if isinstance(entry, ShardedTensor):
        yield _piece(name, entry, 0, parameter.stride())
        return
    # A factory cuts a parameter into several tensors (for example SwiGLU's gate and up projections). It is
    # given the indices of the elements in place of their values, so its tensors show where each element went.
    numbers = torch.arange(parameter.numel(), device="cpu").view(parameter.shape)
    for built in nested_values(dataclasses.replace(entry, data=numbers).build()):
        if isinstance(built, ShardedTensor) and built.data is not None and built.data.numel():
            start = int(built.data.flatten()[0])
            strides = tuple(
                int(built.data.select(axis, 1).flatten()[0]) - start if size > 1 else 0
                for axis, size in enumerate(built.data.shape)
            )
            if torch.equal(built.data, numbers.as_strided(built.data.shape, strides, start)):
                yield _piece(name, built, start, strides)


def _piece(name: str, tensor: ShardedTensor, start: int, strides: tuple[int, ...]) -> Piece:
    prepended = tensor.prepend_axis_num
    return Piece(
        name=name,
        key=tensor.key,
        offset=tuple(tensor.global_offset),
        shape=(*[1] * prepended, *tensor.local_shape),
        start=start,
        strides=(*[0] * prepended, *strides),
    )


def _local_piece(chunk: Any, name: str, parameter: torch.nn.Parameter) -> Piece:
    """Return the Piece of a parameter without a ShardedTensor, as a tensor of this model-parallel rank."""
    groups = (chunk.tp_group, chunk.pp_group, chunk.ep_group)
    ranks = (group[0].rank() if isinstance(group, list) else group.rank() for group in groups)
    key = f"{name}@" + ".".join(map(str, ranks))
    return Piece(
        name, key, (0,) * parameter.dim(), tuple(parameter.shape), 0, tuple(parameter.detach().stride())
    )


def compressed(chunks: Any) -> list[Any]:
    """Return those of the wrapped chunks whose gradients are compressed."""
    found = []
    for chunk in chunks if isinstance(chunks, list | tuple) else [chunks]:
        state = session_of(chunk)
        if state is not None and state.config.compresses:
            found.append(chunk)
    return found


def state_dict(
    model: Any, optimizer: Any = None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """Call session.sharded_state.state_dict. fp16 needs `optimizer`, because errors carry its loss scale."""
    rank_of = _rank_of(model, optimizer, "state_dict")
    return sharded_state.state_dict(rank_of, loss_scale(optimizer), reader, path)


def load_state_dict(model: Any, state: dict[str, Any], optimizer: Any = None) -> None:
    """Call session.sharded_state.load_state_dict; `optimizer` is needed as in `state_dict`."""
    sharded_state.load_state_dict(_rank_of(model, optimizer, "load_state_dict"), state, loss_scale(optimizer))


def _rank_of(model: Any, optimizer: Any, caller: str) -> RankOf | None:
    chunks = compressed(chunks_of(model, caller))
    if not chunks:
        return None
    if optimizer is None and getattr(chunks[0].config, "fp16", False):
        raise UserError("with fp16 errors carry the loss scale: pass the optimizer too, as second argument")
    return lambda _: rank_state_of(chunks)
