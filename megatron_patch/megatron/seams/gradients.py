"""Seam: reduces the gradients of one Megatron bucket group in low bits.

`_ParamAndGradBucketGroup.start_grad_sync` (megatron.core.distributed.param_and_grad_buffer) does much that
must stay Megatron's: draining predecessors, NaN checks, gradient_scaling_factor, streams, CUDA-graph events.
Then it calls a collective per bucket, in order:

    distributed optimizer                  `dist_reduce_scatter_func`, a global of that module
      with several instances of it         and `torch.distributed.all_reduce` of the shard, between instances
    replicated optimizer                   `torch.distributed.all_reduce` of the bucket

The method is overridden on the INSTANCE. While the original runs, the module's two globals only record the
collectives (intercept.py). After it, the same collectives run in low bits, each by its exchange
(collectives/exchange.py), and the handle that Megatron has stored is replaced by ours.

To replace torch.distributed itself, one layer down, would affect its other users; the whole method, one layer
up, differs between releases. The exchanges run after the call, because within it Megatron's
`_coalescing_manager` is open, in which an all-to-all runs at once but an all-gather waits for its end.

The first batch is dispatched in `finish_grad_sync`, later ones from backward hooks: both call this method.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from megatron_patch.collectives.exchange import Exchange, Handle
from megatron_patch.collectives.makers import Reduction, make_all_reduces, make_reduce_scatters
from megatron_patch.megatron import patching
from megatron_patch.megatron.seams.intercept import CollectiveCalls, intercepted
from megatron_patch.megatron.seams.momentum import MomentumBuffers
from megatron_patch.megatron.seams.traffic import stock_gradients
from megatron_patch.quantization.blocks import Contents, Span
from megatron_patch.session import torch_steps
from megatron_patch.session.session import Session

_RERUNS = (RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT)


class _AllHandles:
    """Replaces the single handle of a bucket group of Megatron (`grad_reduce_handle`)."""

    def __init__(self, handles: Sequence[Handle], stream: torch.cuda.Stream | None = None) -> None:
        self._handles = handles
        self._stream = stream

    def wait(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for handle in self._handles:
                handle.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class Stage:
    """One of the successive collectives that reduce a bucket group's gradients, for all of its buckets."""

    kind: str
    """The kind of the collective: "reduce-scatter" or "all-reduce"."""
    of: str
    """The tensor that is exchanged: "gradient" or "momentum"."""
    group: dist.ProcessGroup
    contents: Sequence[Contents]
    """For each bucket, where parameters lie in the tensor that this stage reduces."""
    averages: bool
    """Whether the sum is divided by the number of ranks."""
    reduction: Reduction
    """It has an exchange for each bucket, but none over a single rank or with method none."""


def is_rerun() -> bool:
    """Whether Megatron's rerun state machine runs the current pass again."""
    return get_rerun_state_machine().state in _RERUNS


def contents_of(bucket: Any, momentum: bool = False) -> Contents:
    """Return where the parameters lie in a Megatron bucket, which has padding between and after them.

    Vectors (norms' weights, biases) are sent exactly, but 1-bit Adam sends their momentum in 1 bit too.
    """
    spans = [
        Span.of(start, parameter.shape, exact=parameter.dim() < 2 and not momentum)
        for parameter, (start, _) in bucket.param_to_index.items()
    ]
    return Contents(bucket.grad_data.numel(), tuple(sorted(spans, key=lambda span: span.start)))


class BucketGroupSeam:
    """Overrides `start_grad_sync` of one bucket group until `detach`.

    `group` is the bucket group, and `stages` are its collectives in the order in which they run.

    Args:
        bucket_group: the `_ParamAndGradBucketGroup` of Megatron.
        session: the chunk's session, in which the senders are allocated.
        expert: whether the parameters are experts', reduced over the expert-data-parallel group.
    """

    def __init__(self, bucket_group: Any, session: Session, expert: bool = False) -> None:
        self.group = bucket_group
        self.expert = expert
        self._session = session
        config = bucket_group.ddp_config
        self.scatter_group: dist.ProcessGroup | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        if not config.use_distributed_optimizer:
            self.reduce_group = bucket_group.data_parallel_group
        else:
            self.scatter_group = bucket_group.intra_distributed_optimizer_instance_group
            if config.num_distributed_optimizer_instances > 1:
                self.reduce_group = bucket_group.inter_distributed_optimizer_instance_group
        self.momentum: MomentumBuffers | None = None
        if session.config.is_onebit_adam:
            everyone = self.scatter_group or self.reduce_group
            assert everyone is not None
            self.momentum = MomentumBuffers(bucket_group, everyone, self.scatter_group)
        self.stages = list(self._stages())
        session.exchanges += self.exchanges

        self._detached = False
        self._original = bucket_group.start_grad_sync

        @functools.wraps(self._original)
        def start_grad_sync(force_all_reduce: bool | None = False) -> None:
            if self._detached:  # Another override may still call this one.
                self._original(force_all_reduce=force_all_reduce)
            else:
                self._start_grad_sync(force_all_reduce)

        self._override = patching.override(bucket_group, "start_grad_sync", start_grad_sync)

    def _stages(self) -> Iterator[Stage]:
        setup, average = self._session.setup, self.group.ddp_config.average_in_collective
        buckets = [contents_of(bucket, setup.config.is_onebit_adam) for bucket in self.group.buckets]
        compresses = setup.config.compresses
        if self.momentum is not None:  # Momentum is always averaged in whole buckets.
            everyone = self.momentum.group
            reduction = make_all_reduces(buckets, everyone, setup)
            yield Stage("all-reduce", "momentum", everyone, buckets, True, reduction)
            return
        scatter, reduce = self.scatter_group, self.reduce_group
        if scatter is not None:
            reduction = make_reduce_scatters(buckets, scatter, setup) if compresses else Reduction()
            yield Stage("reduce-scatter", "gradient", scatter, buckets, average, reduction)
        if reduce is not None:
            shards, shard = (scatter.size(), scatter.rank()) if scatter is not None else (1, 0)
            sizes = [bucket.numel // shards for bucket in buckets]
            owned = [bucket.part(shard * size, size) for bucket, size in zip(buckets, sizes, strict=True)]
            # The all-reduce between instances of the distributed optimizer takes one hop.
            one_hop = scatter is not None
            reduction = make_all_reduces(owned, reduce, setup, one_hop) if compresses else Reduction()
            yield Stage("all-reduce", "gradient", reduce, owned, average, reduction)

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """The exchanges of all stages and buckets, in the order in which they were allocated."""
        return (exchange for stage in self.stages for exchange in stage.reduction.exchanges)

    @property
    def compresses(self) -> bool:
        """Whether any of this group's gradients, or their momentum, are sent in low bits."""
        return any(stage.reduction.exchanges for stage in self.stages)

    def detach(self) -> None:
        self._detached = True
        self._override.undo()

    def _start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        group = self.group
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # Megatron returns here too, because this batch was dispatched already.
        session = self._session
        session.pass_begins(self, is_rerun(), torch_steps.loss_scale())
        if self.momentum is not None and session.active:
            self._leave_unreduced(force_all_reduce)
            return
        if not self.compresses or force_all_reduce or not session.active:
            session.count(stock_gradients(group, bool(force_all_reduce)))
            if self.compresses:
                session.ledger.events.uncompressed_syncs += 1
            self._original(force_all_reduce=force_all_reduce)
            return

        with intercepted() as calls:
            self._original(force_all_reduce=force_all_reduce)
        self._check(calls)
        stream = self._stream()
        overlaps = group.grad_reduce_handle is not None
        group.grad_reduce_handle = None  # Megatron leaves None if a collective fails.
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            handles = self._start(calls)
            if overlaps:
                group.grad_reduce_handle = _AllHandles(handles, stream)
            else:
                _AllHandles(handles).wait()

    def _leave_unreduced(self, force_all_reduce: bool | None) -> None:
        """Leave gradients unreduced, because 1-bit Adam exchanges momentum after its warm-up."""
        assert self.momentum is not None
        if force_all_reduce:
            raise RuntimeError(
                "megatron-loco: onebit_adam reduces no gradients after its warm-up; leave out what asks for "
                "them by force_all_reduce, such as --save-wgrads-interval"
            )
        with intercepted() as calls:
            self._original(force_all_reduce=force_all_reduce)
        self._check(calls)
        self.momentum.mean_factor = 1.0 if calls.average else float(self.momentum.group.size())
        if self.group.grad_reduce_handle is not None:
            self.group.grad_reduce_handle = _AllHandles([])

    def _start(self, calls: CollectiveCalls) -> Sequence[Handle]:
        """Start the recorded collectives in low bits; those of the last stage may still run on return."""
        handles: list[Handle] = []
        for stage in self.stages:
            for handle in handles:
                handle.wait()  # This stage needs the sums of the one before.
            if stage.reduction.exchanges:
                handles = [
                    self._session.start(exchange, tensor, output, calls.average, stage.group)
                    for exchange, (output, tensor) in zip(
                        stage.reduction.exchanges, calls.of(stage.kind), strict=True
                    )
                ]
        return handles

    def _stream(self) -> torch.cuda.Stream | None:
        """Return the side stream for this group's exchange; None without overlap and on CPU.

        With overlap, a side stream keeps compression, and waiting for buckets in flight, from blocking the
        backward pass.
        """
        config = self.group.ddp_config
        if not config.overlap_grad_reduce or self._session.device.type != "cuda":
            return None
        if config.num_distributed_optimizer_instances > 1:
            upstreams: torch.cuda.Stream = self.group.communication_stream  # It has waited already.
            return upstreams
        stream = self._session.workspace.pool.stream_of(self.stages[0].group)
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def _check(self, calls: CollectiveCalls) -> None:
        buckets = len(self.group.buckets)
        expected = (buckets if self.scatter_group else 0, buckets if self.reduce_group else 0)
        counts = (len(calls.reduce_scatter), len(calls.all_reduce))
        if counts != expected:
            raise RuntimeError(
                "megatron-loco: start_grad_sync of megatron.core.distributed.param_and_grad_buffer asked for "
                f"{counts[0]} reduce-scatters and {counts[1]} all-reduces through the module's globals, not "
                f"{expected[0]} and {expected[1]}: this release of megatron-core is not supported"
            )
