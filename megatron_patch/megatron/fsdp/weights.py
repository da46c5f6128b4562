"""Seam: gathers Megatron-FSDP's updated weights exactly, where every rank has them whole (`optim_grads`).

`AllGatherPipeline` gathers a bucket of weights in `async_bucket_gather`: with `optim_grads` once a step,
inside the optimizer's step, or with `overlap_param_gather` from there on and in the next forward pass. Here
each bucket takes the role of a DDP bucket group, with the states of seams/weights.py: a gather that Megatron
asks for inside the step runs after the step. The messages of later gathers are sent when Megatron has asked
for all buckets, because nothing is sent within its `_coalescing_manager`. With `optim_grads_params` gathers
are counted only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.patching import View
from megatron_patch.megatron.seams.intercept import for_this_thread, one_thread
from megatron_patch.megatron.seams.weights import ChunkWeights, MessagesUnderWay, State, WeightSeam
from megatron_patch.session.session import Session


class _BucketGroup:
    """A bucket of Megatron-FSDP's weights with the attributes of a DDP bucket group that WeightSeam reads."""

    param_gather_handle = None

    def __init__(self, number: int, buffer: Any, config: Any, asked: list[_Seam]) -> None:
        size = buffer.bucket_index.size
        whole = not buffer.is_data_distributed
        weights = buffer.data[:size] if whole else torch.empty(size, dtype=buffer.dtype, device="meta")
        self.number = number
        self.buckets = [SimpleNamespace(bucket_id=number, param_data=weights)]
        self.ddp_config = config
        self.intra_distributed_optimizer_instance_group: dist.ProcessGroup = buffer.data_parallel_group
        self.intra_distributed_optimizer_instance_size = buffer.data_parallel_group.size()
        self.asked = asked
        """The seams whose messages are sent next; all buckets of a model share this list."""
        self.gather: Callable[[], Any] | None = None
        """A call that runs the all-gather of this bucket for which Megatron-FSDP has asked last."""
        self.handle: Any = None
        self.within_upstream = False

    def wait(self) -> None:
        """Do nothing: Megatron-FSDP waits for this handle, but the gather ends in `wait_bucket_ready`."""

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the bucket in full, by the all-gather for which Megatron-FSDP has asked."""
        assert self.gather is not None
        self.handle = self.gather()
        if not self.within_upstream:
            self.handle.wait()


class _Seam(WeightSeam):
    @property
    def _defers(self) -> bool:
        return True

    def _start_param_sync(self, force_sync: bool) -> None:
        if self._state is State.READY:
            self._state = State.IN_FULL
            self.group.asked.append(self)
        else:
            super()._start_param_sync(force_sync)

    def _call_upstream(self) -> None:
        self._state = State.IN_FULL  # Megatron-FSDP has done its own bookkeeping already.


class WeightGathers:
    """Overrides an AllGatherPipeline until `detach`; `weights` has the seams of its buckets.

    Args:
        pipeline: the AllGatherPipeline of Megatron-FSDP.
        config: the model's DistributedDataParallelConfig.
        session: the model's session.
    """

    def __init__(self, pipeline: Any, config: Any, session: Session) -> None:
        self._asked: list[_Seam] = []
        self._depth = 0
        self._under_way: dict[int, MessagesUnderWay] = {}
        self._groups: dict[int, _BucketGroup] = {}
        chunk = SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[])
        for number, params in enumerate(pipeline.buffer.parameter_groups):
            if params.model_weight_buffer is not None:
                group = _BucketGroup(number, params.model_weight_buffer, config, self._asked)
                self._groups[number] = group
                kind = chunk.expert_parallel_bucket_groups if params.is_expert_param else chunk.bucket_groups
                kind.append(group)
        self.weights = ChunkWeights(chunk, session, _Seam)
        methods = (self._all_gather_params, self._async_bucket_gather, self._wait_bucket_ready)
        names = [path.rpartition(".")[2] for path in symbols.FSDP_GATHERS]
        self._originals = {name: getattr(pipeline, name) for name in names}
        self._overrides = [patching.override(pipeline, *pair) for pair in zip(names, methods, strict=True)]

    def detach(self) -> None:
        """Wait for the messages under way, and restore the pipeline's original methods."""
        self._groups = {}  # Another override may still call this one.
        while self._under_way:
            self._under_way.popitem()[1].wait()
        for override in self._overrides:
            override.undo()
        self.weights.detach()

    def _all_gather_params(self, *args: Any, **kwargs: Any) -> None:
        with self._asking():
            self._originals["all_gather_params"](*args, **kwargs)

    def _async_bucket_gather(self, bucket_id: int, bwd: bool) -> None:
        group, upstream = self._groups.get(bucket_id), param_and_grad_buffer.torch
        if group is None:
            self._originals["async_bucket_gather"](bucket_id, bwd)
            return

        def all_gather(**collective: Any) -> Any:
            group.gather = lambda: upstream.distributed.all_gather_into_tensor(**collective)
            group.handle, group.within_upstream = group, True
            try:
                group.start_param_sync(force_sync=False)
            finally:
                group.within_upstream = False
            return group.handle

        either = for_this_thread(all_gather, upstream.distributed.all_gather_into_tensor)
        view = View(upstream, distributed=View(upstream.distributed, all_gather_into_tensor=either))
        with self._asking(), one_thread, patching.swapped({symbols.FSDP_TORCH: view}):
            self._originals["async_bucket_gather"](bucket_id, bwd)

    def _wait_bucket_ready(self, bucket_id: int, *args: Any, **kwargs: Any) -> None:
        self._originals["wait_bucket_ready"](bucket_id, *args, **kwargs)
        if (under_way := self._under_way.pop(bucket_id, None)) is not None:
            under_way.wait()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Within the block Megatron-FSDP asks for gathers; at its end the messages of coded ones are sent."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth:
            return
        asked = self._asked.copy()
        self._asked.clear()
        for ranks in dict.fromkeys(seam.ranks for seam in asked):
            seams = [seam for seam in asked if seam.ranks is ranks]
            under_way = MessagesUnderWay(seams, self.weights, own_may_have_changed=True)
            self._under_way |= {seam.group.number: under_way for seam in seams}
