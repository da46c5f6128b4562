"""Seam: gathers one Megatron bucket group's updated weights exactly, from their changes.

`_ParamAndGradBucketGroup.start_param_sync` (megatron.core.distributed.param_and_grad_buffer) is where every
gather of weights begins: after the optimizer's step, from forward hooks, from the pipeline's schedule, and
forced before evaluation and checkpoints. It is overridden on the INSTANCE. The collective that it asks for,
by the module's global `dist_all_gather_func`, is replaced by ours (weights/gather.py) where

    the optimizer's outermost step has ended      own shards are coded there, lengths exchanged
    all ranks hold the same copies                found out with the lengths
    it is the first gather since, and not forced

Any other gather is Megatron's own, which is always right. Without `overlap_param_gather` Megatron gathers
inside the step, once for each of the chained optimizers: those calls are noted, and one gather follows the
outermost step.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.megatron import patching
from megatron_patch.megatron.seams.intercept import intercepted_all_gathers
from megatron_patch.megatron.seams.traffic import (
    DIFFERENT,
    EDITED,
    FORCED,
    IN_STEP,
    NO_SHORTER,
    NOT_CODED,
    BucketReport,
    stock_because,
    stock_bucket_weights,
)
from megatron_patch.session.session import IN_FLIGHT, Session
from megatron_patch.weights.batch import Batch, BatchHandle, batches
from megatron_patch.weights.gather import Agreement, WeightGather, agree

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 24


class State(enum.Enum):
    """What a bucket group's next gather does, and, within the optimizer's step, what was asked for."""

    IN_FULL = enum.auto()
    """It sends whole weights, as Megatron does."""
    IN_STEP = enum.auto()
    """The optimizer writes the own shard."""
    DEFERRED = enum.auto()
    """In the step, and Megatron has asked for a gather, which follows the step."""
    GATHERED = enum.auto()
    """In the step, and gathered in full since it began."""
    READY = enum.auto()
    """It sends messages: they are encoded, and all ranks have agreed."""


_WITHIN_STEP = (State.IN_STEP, State.DEFERRED, State.GATHERED)


class ChunkWeights:
    """The weight gathers of one model chunk: its seams, what is in flight, and what was sent.

    Args:
        chunk: Megatron's DDP instance; torch's FSDP2 in Megatron's engine has no bucket groups.
        state: the chunk's, for its options and its workspace.
        kind: of seams; WeightSeam's subclass where bucket groups are not DDP's.
    """

    def __init__(self, chunk: Any, state: Session, kind: type[WeightSeam] | None = None) -> None:
        dense, experts = (
            getattr(chunk, name, []) for name in ("bucket_groups", "expert_parallel_bucket_groups")
        )
        self.state = state
        self.raw_gathers: Counter[str] = Counter()
        """Bucket groups that are coded and were gathered in full, by reason; since the start."""
        self.report: list[BucketReport] = []
        """What the last step's gathers sent, by bucket."""
        self.in_flight: deque[BatchHandle] = deque()
        self.unchecked: list[BatchHandle] = []
        self.seams = [
            (kind or WeightSeam)(group, self, expert=place >= len(dense))
            for place, group in enumerate([*dense, *experts])
            if group.ddp_config.use_distributed_optimizer
        ]

    @property
    def nbytes(self) -> int:
        """Memory of old shards and messages."""
        return sum(gather.nbytes for seam in self.seams for gather in seam.gathers)

    def start(self, batch: Batch, own_may_have_changed: bool) -> BatchHandle:
        """Start a gather, and end one that began long ago: few messages are held in memory."""
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.popleft().wait()
        handle = batch.start(self.state.workspace, own_may_have_changed)
        self.in_flight.append(handle)
        self.unchecked.append(handle)
        return handle

    def end_step(self, continues: bool = False) -> None:
        """The optimizer's step is over: what was sent since the last one is its report.

        Where it `continues` the last step, as another optimizer of the same model, it is added to that
        report.
        """
        new = [bucket for seam in self.seams for bucket in seam.take_report()]
        if continues:
            new = [before.with_more(more) for before, more in zip(self.report, new, strict=True)]
        self.report = new

    def check(self) -> None:
        """See that all messages of the last gathers fitted (on CUDA only; on CPU it is known)."""
        handles, self.unchecked = self.unchecked, []
        for handle in handles:
            handle.check()

    def detach(self) -> None:
        for seam in self.seams:
            seam.detach()


class WeightSeam:
    """Overrides `start_param_sync` of one bucket group until `detach`; counts what is not coded, too."""

    def __init__(self, bucket_group: Any, chunk: ChunkWeights, expert: bool) -> None:
        self.group = bucket_group
        self.expert = expert
        self.chunk = chunk
        self.ranks: dist.ProcessGroup = bucket_group.intra_distributed_optimizer_instance_group
        self.stock_because = stock_because(bucket_group, chunk.state.config.codes_weights)
        kind = "expert bucket" if expert else "bucket"
        names = [f"{kind} {bucket.bucket_id}" for bucket in bucket_group.buckets]
        self._reports = [BucketReport(name) for name in names]
        self.gathers = [
            WeightGather(bucket.param_data, self.ranks, chunk.state.workspace, name)
            for bucket, name in zip(bucket_group.buckets, names, strict=True)
            if self.stock_because is None
        ]
        self._state = State.IN_FULL
        self._behind = False
        """Whether the other ranks' copies are older than this rank's shard."""
        self._why_raw = NOT_CODED
        self._detached = False
        self._original = bucket_group.start_param_sync

        @functools.wraps(self._original)
        def start_param_sync(force_sync: bool = False) -> None:
            if self._detached:  # somebody's override still calls this one
                self._original(force_sync=force_sync)
                return
            chunk.state.memory.bring_back()
            self._start_param_sync(force_sync)

        self._override = patching.override(bucket_group, "start_param_sync", start_param_sync)

    def detach(self) -> None:
        """Restore the bucket group's original method."""
        self._detached = True
        self._override.undo()

    @property
    def _overlaps(self) -> bool:
        return bool(self.group.ddp_config.overlap_param_gather)

    @property
    def _defers(self) -> bool:
        """Whether what is asked for inside the optimizer's step is gathered after it."""
        return not self._overlaps

    def take_report(self) -> list[BucketReport]:
        """What was sent since the last call."""
        taken = self._reports
        self._reports = [BucketReport(report.name) for report in taken]
        return taken

    def before_step(self) -> None:
        """The optimizer's outermost step begins, in which the own shard is overwritten."""
        if not self.gathers:
            return
        if isinstance(self.group.param_gather_handle, MessagesUnderWay):
            self.group.param_gather_handle.wait()
        if not self._behind:
            for gather in self.gathers:
                gather.remember()
        self._state = State.IN_STEP

    def step_failed(self) -> None:
        """The optimizer's outermost step has raised."""
        self._state = State.IN_FULL

    def step_ended(self) -> bool:
        """The optimizer's outermost step is over; whether what it wrote is still to be gathered."""
        waits = self._overlaps and self.group.param_gather_handle is None
        if self._state is State.DEFERRED or (self._state is State.IN_STEP and waits):
            return True
        self._state = State.IN_FULL
        return False

    def after_step(self, agreed: Sequence[Agreement]) -> bool:
        """All ranks know of each bucket whether it may be sent. Whether a deferred gather is to send it
        now."""
        differ = any(bucket.difference for bucket in agreed)
        self._behind, asked = True, self._state is State.DEFERRED
        ready = not differ and all(bucket.saves for bucket in agreed)
        self._state = State.READY if ready else State.IN_FULL
        self._why_raw = DIFFERENT if differ else NO_SHORTER
        for report, gather in zip(self._reports, self.gathers, strict=True):
            report.traffic.nbytes += (self.ranks.size() - 1) * _LENGTH_BYTES
            report.weights, report.message_bytes = gather.shard_size, gather.message_bytes
            report.unchanged = gather.unchanged
        if not asked:
            return False
        if ready:
            self._call_upstream()
        else:
            self._gather_in_full(force_sync=False)
        return ready

    def _start_param_sync(self, force_sync: bool) -> None:
        if self._state in _WITHIN_STEP and not force_sync and self._defers:
            self._state = State.DEFERRED
            return
        if force_sync and self.group.param_gather_handle is not None:
            self._original(force_sync=True)  # which only waits for it
            return
        if force_sync or self._state is not State.READY:
            self._gather_in_full(force_sync)
            return
        self._call_upstream()
        handle = MessagesUnderWay([self], self.chunk, own_may_have_changed=True)
        if self.group.param_gather_handle is not None:
            self.group.param_gather_handle = handle
        else:
            handle.wait()

    def _gather_in_full(self, force_sync: bool) -> None:
        in_step = self._state in _WITHIN_STEP
        if self.gathers:
            why = FORCED if force_sync else IN_STEP if in_step else self._why_raw
            self.chunk.raw_gathers[why] += 1
        for report, bucket in zip(self._reports, self.group.buckets, strict=True):
            report.traffic.add(stock_bucket_weights(self.group, bucket))
        self._original(force_sync=force_sync)
        self._behind, self._why_raw = False, NOT_CODED
        self._state = State.GATHERED if in_step else State.IN_FULL

    def _call_upstream(self) -> None:
        """Upstream's method without its collective: it leaves a handle where the caller does not wait."""
        with intercepted_all_gathers() as calls:
            self._original(force_sync=False)
        found = [(output.data_ptr(), output.numel()) for output in calls]
        if found != [(b.param_data.data_ptr(), b.param_data.numel()) for b in self.group.buckets]:
            raise RuntimeError(
                "megatron-loco: start_param_sync of megatron.core.distributed.param_and_grad_buffer did not "
                "ask for one all-gather of each bucket through dist_all_gather_func: weight_gather exact "
                "does not support this release of megatron-core"
            )
        self._state = State.IN_FULL

    def count(self, batch: Batch) -> None:
        """Count what a batch sends of this group's buckets."""
        for report, gather in zip(self._reports, self.gathers, strict=True):
            if gather in batch.gathers:
                elements = (self.ranks.size() - 1) * gather.shard_size
                report.traffic.add(Traffic(batch.nbytes_of(gather), elements))

    def gathered(self, handles: Sequence[BatchHandle]) -> None:
        """All ranks have the weights now."""
        self._behind = False
        in_full = [gather for handle in handles if handle.in_full for gather in handle.batch.gathers]
        if any(gather in in_full for gather in self.gathers):
            self.chunk.raw_gathers[EDITED] += 1
        for report, bucket, gather in zip(self._reports, self.group.buckets, self.gathers, strict=True):
            if gather in in_full:
                report.traffic.add(stock_bucket_weights(self.group, bucket))


class MessagesUnderWay:
    """The messages of some bucket groups, on their way; stands in upstream's `param_gather_handle`, too.

    Args:
        seams: of one process group.
        chunk: which holds the messages.
        own_may_have_changed: as Batch.start.
    """

    def __init__(self, seams: Sequence[WeightSeam], chunk: ChunkWeights, own_may_have_changed: bool) -> None:
        self._seams: Sequence[WeightSeam] = seams
        self._handles: list[BatchHandle] = []
        for batch in batches([gather for seam in seams for gather in seam.gathers]):
            self._handles.append(chunk.start(batch, own_may_have_changed))
            for seam in seams:
                seam.count(batch)

    def wait(self) -> None:
        """Write the weights. Once only."""
        seams, self._seams = self._seams, ()
        for seam in seams:
            for handle in self._handles:
                handle.wait()
            seam.gathered(self._handles)


def gathered_after(chunks: Sequence[ChunkWeights], step: Callable[[], Any]) -> Any:
    """Run an optimizer's outermost step, and what its weights' gathers need before and after it.

    Args:
        chunks: those whose parameters the optimizer updates, in the same order on all ranks.
        step: the step; what it returns is returned.
    """
    seams = [seam for chunk in chunks for seam in chunk.seams]
    for seam in seams:
        seam.before_step()
    try:
        result = step()
        for chunk in chunks:
            chunk.check()
    except BaseException:
        for seam in seams:
            seam.step_failed()
        raise
    coming = [seam for seam in seams if seam.step_ended()]
    for group in dict.fromkeys(seam.ranks for seam in coming):
        _code([seam for seam in coming if seam.ranks is group], group)
    return result


def _code(seams: Sequence[WeightSeam], group: dist.ProcessGroup) -> None:
    agreed = agree([gather for seam in seams for gather in seam.gathers])
    for bucket in agreed:
        if bucket.difference and group.rank() == 0:
            logger.warning("megatron-loco: weights differ, gathered in full: %s", bucket.difference)
    of_seams = iter(agreed)
    now = [seam for seam in seams if seam.after_step([next(of_seams) for _ in seam.gathers])]
    if now:  # no code of the user's has run since the weights were coded
        MessagesUnderWay(now, now[0].chunk, own_may_have_changed=False).wait()
