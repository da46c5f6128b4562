"""Megatron-FSDP (`--use-megatron-fsdp`) as it is attached: its gradients, and with `optim_grads` its weights.

optim_grads          weights whole on every rank, gathered once a step; gradients reduce-scattered in
                     each microbatch. LoCo's errors are as large as with Megatron's DDP.
optim_grads_params   weights in shards, gathered twice a microbatch: `naive` is the default, since errors
                     are of the whole model on every rank.
HSDP                 either of them inside an optimizer instance, in full; the all-reduce of a step's
                     reduced shard between instances is in low bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.fsdp.gradients import GradientReductions, contents_of
from megatron_patch.megatron.fsdp.weights import WeightGathers
from megatron_patch.megatron.seams import gradients as replicated_params
from megatron_patch.megatron.startup_log import weight_lines
from megatron_patch.session.report import method_line, naive_line
from megatron_patch.session.resharding import Part, Piece
from megatron_patch.session.session import Session


class AttachedMegatronFsdp:
    """An attached chunk of Megatron's FullyShardedDataParallel (megatron.core.distributed.fsdp).

    Args:
        chunk: it; unsupported.py has seen it.
        config: the options as given.
    """

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        self.asked = config
        self._fsdp = fsdp = chunk.module
        index, settings = fsdp.dist_index, chunk.ddp_config
        self._sharded = settings.data_parallel_sharding_strategy == "optim_grads_params"
        self._outer: dist.ProcessGroup | None = (
            index.get_outer_fsdp_group() if index.use_hybrid_fsdp else None
        )
        if self._sharded and self._outer is None:
            config = config.for_flat_fsdp()
        buffer = fsdp.param_and_grad_buffer
        self._tensor: dist.ProcessGroup = chunk.tp_group
        has_experts = any(group.is_expert_param for group in buffer.parameter_groups)
        groups = [index.get_fsdp_group(), self._outer, *([self._tensor] if has_experts else [])]
        self.state = Session(config, fsdp.device, [group for group in groups if group is not None])
        self.seams: list[Any] = []
        """None: Megatron-FSDP has no bucket groups of DDP's."""
        self._reductions = GradientReductions(fsdp.grad_reduce_pipeline, self.state, self._outer)
        self._gathers = WeightGathers(fsdp.all_gather_pipeline, settings, self.state)
        self.weights = self._gathers.weights
        self.state.memory.sources.append(self._kept)
        self._marked = replicated_params.mark(chunk, self._tensor) if config.compresses else []

    def _kept(self) -> Iterator[torch.Tensor]:
        """What the weight gather keeps on the device."""
        for seam in self.weights.seams:
            for gather in seam.gathers:
                yield from gather.kept

    def detach(self) -> None:
        """Megatron-FSDP's own exchange from the next backward pass on."""
        self._reductions.detach()
        self._gathers.detach()
        replicated_params.unmark(self._marked)

    def lines(self) -> Iterator[str]:
        """What is on, for the log."""
        config, buffers = self.state.config, self._reductions.buffers
        elements = sum(buffer.bucket_index.size for buffer in buffers.values())
        if not config.compresses:
            yield "method none: Megatron-FSDP's own gradient exchange"
        else:
            yield method_line(config)
            if self._reductions.flat_because is not None:
                yield f"one hop, not two, for a group of ranks: {self._reductions.flat_because}"
            found = next(iter(self._reductions.exchanges.values()), None)
            how = "not compressed: the group is a single rank" if found is None else found.describe()
            where = "once a microbatch" if self._outer is None else "between optimizer instances, once a step"
            buckets = f"{len(buffers)} bucket{'s' if len(buffers) > 1 else ''}"
            yield f"Megatron-FSDP {how}, {where}: {elements:,} gradient elements in {buckets}"
            if config != self.asked:
                yield naive_line(elements)
        yield from (line for _, line in weight_lines(config, self.weights.seams))

    def ranks(self) -> dict[str, int]:
        """Sizes of the groups, for checkpoints."""
        outer = 1 if self._outer is None else self._outer.size()
        return {"data": self._fsdp.dist_index.get_fsdp_group().size(), "instances": outer}

    def parts(self) -> list[tuple[Sender, Part]]:
        """Every sender, and what its error state is of: of tensors that are this model-parallel rank's."""
        model_parallel = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        here = ".".join(map(str, model_parallel))
        names = self._fsdp.param_and_grad_buffer.param_to_name
        averages = self._fsdp.ddp_config.average_in_collective
        found = []
        for number, exchange in self._reductions.exchanges.items():
            buffer = self._reductions.buffers[number]
            contents, shards = contents_of(buffer), buffer.data_parallel_group
            first = 0 if self._outer is None else shards.rank() * (contents.numel // shards.size())
            pieces = tuple(
                _piece(names[parameter], here, buffer.item_index_map[item])
                for parameter, item in buffer.param_idx.items()
            )
            for state in exchange.states():
                position = dataclasses.replace(state.position, start=first + state.position.start)
                spans = () if state.sender.layout.by_shard else contents.spans or ()
                weight, numel = 1 / state.ranks if averages else 1.0, contents.numel
                part = Part(state.kind, pieces, numel, position, state.index, state.senders, weight, spans)
                found.append((state.sender, part))
        return found


def _piece(name: str, here: str, item: Any) -> Piece:
    """A whole parameter of this model-parallel rank; `item` is upstream's TensorItemIndex."""
    shape = tuple(item.shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Piece(name, f"{name}@{here}", (0,) * len(shape), shape, item.global_data_index, strides)
