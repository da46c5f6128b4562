"""Which elements of the model each error state of a rank is of.

A checkpoint may be loaded under another parallelism or bucket size, so a saved error must say where its
elements lie in the whole model. Megatron knows: `sharded_state_dict` of a module tells of every parameter
which box of which global tensor this rank holds (megatron.core.dist_checkpointing.mapping.ShardedTensor).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_patch.collectives.two_hop_all_reduce import TwoHopSenderAndOwner
from megatron_patch.collectives.two_hop_reduce_scatter import TwoHopSender
from megatron_patch.compensation.resharding import (
    ALL_REDUCE,
    NODE_SUM,
    OWNER,
    REDUCE_SCATTER,
    Part,
    Piece,
    Position,
)
from megatron_patch.compensation.sender import Sender
from megatron_patch.integration.attach import Attachment
from megatron_patch.integration.seams.gradients import BucketGroupSeam


def parts_of(chunk: Any, attachment: Attachment) -> list[tuple[Sender, Part]]:
    """Every sender of an attached DDP-wrapped chunk, and what its error state is of. Call on all ranks."""
    pieces = _pieces_of_parameters(chunk)
    return [found for seam in attachment.seams for found in _parts_of_group(seam, pieces)]


def _parts_of_group(
    seam: BucketGroupSeam, pieces: dict[torch.nn.Parameter, tuple[Piece, ...]]
) -> Iterator[tuple[Sender, Part]]:
    scatter, reduce = seam.scatter_group, seam.reduce_group
    shards, shard = (scatter.size(), scatter.rank()) if scatter is not None else (1, 0)
    copies, copy = (reduce.size(), reduce.rank()) if reduce is not None else (1, 0)
    average = seam.group.ddp_config.average_in_collective
    if seam.exchanges_momentum:  # whole buckets, whoever holds Adam's state; the mean, whatever Megatron does
        shards, shard, average = 1, 0, True
        copies, copy = seam.momentum_group.size(), seam.momentum_group.rank()
    buckets = seam.group.buckets
    placed = [
        tuple(
            dataclasses.replace(piece, start=piece.start + start)
            for parameter, (start, _) in bucket.param_to_index.items()
            for piece in pieces[parameter]
        )
        for bucket in buckets
    ]

    def part(kind: str, place: int, position: Position, index: int, senders: int, weight: float) -> Part:
        numel = buckets[place].grad_data.numel()
        return Part(kind, placed[place], numel, position, index, senders, weight)

    for place, sender in enumerate(seam.reduce_scatter):
        if isinstance(sender, TwoHopSender):
            hops, size = sender.hops, sender.sender.layout.shard_size
            node, local = divmod(shard, hops.local)
            column = Position(local * size, size, hops.nodes, hops.local * size)
            index, senders = copy * hops.nodes + node, copies * hops.nodes
            weight = 1 / (copies * shards) if average else 1.0
            yield sender.sender, part(NODE_SUM, place, column, index, senders, weight)
            continue
        whole = Position(0, buckets[place].grad_data.numel())
        index, senders = copy * shards + shard, copies * shards
        weight = 1 / senders if average else 1.0
        yield sender, part(REDUCE_SCATTER, place, whole, index, senders, weight)
    for place, both in enumerate(seam.all_reduce):
        layout = both.sender.layout
        if isinstance(both, TwoHopSenderAndOwner):
            nodes, node = layout.shards, both.hops.inter.rank()
            weight = 1 / copies if average else 1.0
            chunk = Position(both.start, layout.numel)
            yield both.sender, part(ALL_REDUCE, place, chunk, node, nodes, weight)
            start = both.start + min(node * layout.shard_size, layout.numel)
            yield both.owner, part(OWNER, place, Position(start, both.owner.layout.numel), 0, 1, 1.0)
            continue
        start, end = shard * layout.numel, (shard + 1) * layout.numel
        weight = 1 / copies if average else 1.0
        yield both.sender, part(ALL_REDUCE, place, Position(start, layout.numel), copy, copies, weight)
        start = min(start + copy * layout.shard_size, end)
        yield both.owner, part(OWNER, place, Position(start, both.owner.layout.numel), 0, 1, 1.0)


def _pieces_of_parameters(chunk: Any) -> dict[torch.nn.Parameter, tuple[Piece, ...]]:
    """For every parameter its pieces, with `start` counted from the parameter's first element."""
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
    # A factory cuts a parameter in several tensors (SwiGLU's gate and up projections, say). Given the
    # elements' numbers in place of their values, what it builds tells where every element went.
    numbers = torch.arange(parameter.numel()).view(parameter.shape)
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
    """A parameter that Megatron tells nothing of: a tensor of its own for each model-parallel rank."""
    groups = (chunk.tp_group, chunk.pp_group, chunk.ep_group)
    ranks = (group[0].rank() if isinstance(group, list) else group.rank() for group in groups)
    key = f"{name}@" + ".".join(map(str, ranks))
    return Piece(
        name, key, (0,) * parameter.dim(), tuple(parameter.shape), 0, tuple(parameter.detach().stride())
    )
