"""The seam: one Megatron bucket group's reduce-scatter goes out in low bits.

`_ParamAndGradBucketGroup.start_grad_sync` (megatron.core.distributed.param_and_grad_buffer) does much that
must stay upstream's: draining predecessors, NaN checks, gradient_scaling_factor, streams, CUDA-graph events.
It then calls the module global `dist_reduce_scatter_func` once per bucket, in order. So the method is
overridden on the INSTANCE, and only for the length of the original call the global is ours.

Why not one layer down (torch.distributed.reduce_scatter_tensor)? Other users of it would be hit. Why not one
layer up (the whole method)? It differs between releases.

Two traps, each with a test: inside `_coalescing_manager` an all-to-all runs at once while upstream's own
collectives are deferred, and the manager's `wait()` knows nothing of our handle, so `grad_reduce_handle` is
replaced after the call. And the first batch is dispatched in `finish_grad_sync`, later ones from backward
hooks: both go through this method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from megatron_patch.collectives.reduce_scatter import ExchangeHandle
from megatron_patch.integration.compressor import Compressor
from megatron_patch.integration.wire import stock_gradients

_GLOBAL = "dist_reduce_scatter_func"
_REPLAYING = (RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT)


class _AllHandles:
    """Stands where upstream keeps a bucket group's one handle (`grad_reduce_handle`)."""

    def __init__(self, handles: list[ExchangeHandle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


@contextmanager
def _substituted(function: Callable[..., Any]) -> Iterator[None]:
    original = getattr(param_and_grad_buffer, _GLOBAL)
    setattr(param_and_grad_buffer, _GLOBAL, function)
    try:
        yield
    finally:
        setattr(param_and_grad_buffer, _GLOBAL, original)


class BucketGroupSeam:
    """Overrides `start_grad_sync` of one bucket group until `detach`.

    Args:
        bucket_group: Megatron's `_ParamAndGradBucketGroup`, of the distributed optimizer.
        compressor: the chunk's state; one sender per bucket is allocated in it.
    """

    def __init__(self, bucket_group: Any, compressor: Compressor) -> None:
        self._group = bucket_group
        self._compressor = compressor
        self._process_group: dist.ProcessGroup = bucket_group.intra_distributed_optimizer_instance_group
        self._senders = (
            [compressor.add_bucket(b.grad_data.numel(), self._process_group) for b in bucket_group.buckets]
            if compressor.config.compresses and self._process_group.size() > 1
            else []
        )
        self._step_of_last_exchange = -1
        self._original = bucket_group.start_grad_sync

        @functools.wraps(self._original)
        def start_grad_sync(force_all_reduce: bool | None = False) -> None:
            self._start_grad_sync(force_all_reduce)

        bucket_group.start_grad_sync = start_grad_sync

    @property
    def compresses(self) -> bool:
        """Whether this group's gradients leave in low bits (not with a single rank, or method none)."""
        return bool(self._senders)

    def detach(self) -> None:
        """Give the bucket group its own method back."""
        del self._group.start_grad_sync

    def _start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        group = self._group
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # upstream's own early return: this batch was dispatched already
        self._notice_repetition()
        if not self.compresses or force_all_reduce or not self._compressor.active:
            self._count_uncompressed(bool(force_all_reduce))
            self._original(force_all_reduce=force_all_reduce)
            return

        handles: list[ExchangeHandle] = []

        def reduce_scatter(
            output: torch.Tensor,
            input: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> ExchangeHandle | None:
            sender = self._senders[len(handles)]
            average = op == dist.ReduceOp.AVG
            handle = self._compressor.exchange(sender, input, output, group or self._process_group, average)
            handles.append(handle)
            if async_op:
                return handle
            handle.wait()
            return None

        with _substituted(reduce_scatter):
            self._original(force_all_reduce=force_all_reduce)
        if len(handles) != len(self._senders):
            raise RuntimeError(
                "megatron-loco: start_grad_sync of megatron.core.distributed.param_and_grad_buffer reduced "
                f"{len(handles)} of {len(self._senders)} buckets through {_GLOBAL}: "
                "this release of megatron-core is not supported"
            )
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle = _AllHandles(handles)

    def _notice_repetition(self) -> None:
        """Tell the compressor of a backward pass that runs again within one optimizer step."""
        compressor = self._compressor
        if self._step_of_last_exchange == compressor.steps_seen:
            if get_rerun_state_machine().state in _REPLAYING:
                compressor.replayed()
            else:
                compressor.exchanged_twice()
        self._step_of_last_exchange = compressor.steps_seen

    def _count_uncompressed(self, force_all_reduce: bool) -> None:
        self._compressor.count(stock_gradients(self._group, all_reduce=force_all_reduce))
        if self.compresses:
            self._compressor.events.uncompressed_syncs += 1
