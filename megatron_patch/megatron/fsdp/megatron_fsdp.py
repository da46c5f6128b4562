"""Attaches Megatron-FSDP (`--use-megatron-fsdp`): its gradients, and with `optim_grads` its weights.

optim_grads          Every rank has the whole weights, which are gathered once a step; gradients are
                     reduce-scattered in each microbatch. LoCo's errors are as large as with Megatron's DDP.
optim_grads_params   Weights are sharded, and gathered twice a microbatch. The default method is `naive`,
                     because LoCo's errors would have the size of the whole model on every rank.
HSDP                 Inside an optimizer instance either strategy runs uncompressed; only the all-reduce of
                     the reduced shard between instances, once a step, is in low bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.fsdp.gradients import GradientReductions
from megatron_patch.megatron.fsdp.weights import WeightGathers
from megatron_patch.megatron.outer_steps import OuterSteps
from megatron_patch.megatron.seams import replicated_params
from megatron_patch.megatron.startup_log import weight_lines
from megatron_patch.session.report import method_line, naive_line
from megatron_patch.session.session import Session
from megatron_patch.session.states import Exchanged


class MegatronFsdp:
    """An attached model of Megatron-FSDP (FullyShardedDataParallel)."""

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        self.asked = config
        self._fsdp = fsdp = chunk.module
        index, settings, buffer = fsdp.dist_index, chunk.ddp_config, fsdp.param_and_grad_buffer
        self._outer: Any = index.get_outer_fsdp_group() if index.use_hybrid_fsdp else None
        if settings.data_parallel_sharding_strategy == "optim_grads_params" and self._outer is None:
            config = config.for_flat_fsdp()
        experts = any(group.is_expert_param for group in buffer.parameter_groups)
        groups = [index.get_fsdp_group(), self._outer, chunk.tp_group if experts else None]
        ranks = [group for group in groups if group is not None]
        self.session = Session(config, fsdp.device, ranks, chunk.parameters)
        self.outer: OuterSteps | None = None
        self._reductions = GradientReductions(fsdp.grad_reduce_pipeline, self.session, self._outer)
        self._gathers = WeightGathers(fsdp.all_gather_pipeline, settings, self.session)
        self.weights = self._gathers.weights
        self.session.memory.sources.append(
            lambda: (t for seam in self.weights.seams for gather in seam.gathers for t in gather.kept)
        )
        self._marked = replicated_params.mark(chunk, chunk.tp_group) if config.compresses else []

    def detach(self) -> None:
        """Restore Megatron-FSDP's own exchanges from the next backward pass on."""
        self._reductions.detach()
        self._gathers.detach()
        replicated_params.unmark(self._marked)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the log that say what is compressed."""
        config, buffers = self.session.config, self._reductions.buffers
        elements = sum(buffer.bucket_index.size for buffer in buffers.values())
        if not config.compresses:
            yield "method none: Megatron-FSDP's own gradient exchange"
        else:
            yield method_line(config)
            if self._reductions.flat_because is not None:
                yield f"one hop, not two, for a group of ranks: {self._reductions.flat_because}"
            exchange = next(iter(self._reductions.exchanges.values()), None)
            how = "not compressed: the group is a single rank" if exchange is None else exchange.describe()
            where = "once a microbatch" if self._outer is None else "between optimizer instances, once a step"
            buckets = f"{len(buffers)} bucket{'s' if len(buffers) > 1 else ''}"
            yield f"Megatron-FSDP {how}, {where}: {elements:,} gradient elements in {buckets}"
            if config != self.asked:
                yield naive_line(elements)
        yield from (line for _, line in weight_lines(config, self.weights.seams))

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        """Return the process groups by name, for checkpoints: size, and this rank's number."""
        shards = self._fsdp.dist_index.get_fsdp_group()
        outer = (1, 0) if self._outer is None else (self._outer.size(), self._outer.rank())
        return {"data": (shards.size(), shards.rank()), "instances": outer, **model_parallel_groups()}

    def exchanged(self) -> Iterator[Exchanged]:
        """Yield every exchange, for checkpoints."""
        names, averages = (
            self._fsdp.param_and_grad_buffer.param_to_name,
            self._fsdp.ddp_config.average_in_collective,
        )
        for number, exchange in self._reductions.exchanges.items():
            buffer = self._reductions.buffers[number]
            items = {names[p]: buffer.item_index_map[item] for p, item in buffer.param_idx.items()}
            shapes = {name: tuple(item.shape) for name, item in items.items()}
            yield Exchanged(exchange, shapes, averages)


def model_parallel_groups() -> dict[str, tuple[int, int]]:
    """Return Megatron's model-parallel groups by name: size, and this rank's number."""
    return {
        name: (
            getattr(parallel_state, f"get_{name}_model_parallel_world_size")(),
            getattr(parallel_state, f"get_{name}_model_parallel_rank")(),
        )
        for name in ("tensor", "pipeline", "expert")
    }
