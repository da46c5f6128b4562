"""Seam: gathers one Megatron bucket group's updated weights exactly, from their changes.

Every gather of weights begins in `_ParamAndGradBucketGroup.start_param_sync`
(megatron.core.distributed.param_and_grad_buffer): after the optimizer's step, from forward hooks, from the
pipeline's schedule, and forced before evaluation and checkpoints. The method is overridden on the INSTANCE.
The collective for which it asks, by the module's global `dist_all_gather_func`, is replaced by the exact
gather (weights/gather.py) if all of these hold:

    the optimizer's outermost step has ended      its end codes the own shards and exchanges lengths
    all ranks hold the same copies                the exchange of lengths also compares digests
    it is the first gather since, and not forced

Any other gather is Megatron's own, which is always correct. Without `overlap_param_gather` Megatron gathers
inside the step, once for each of the chained optimizers: these calls are deferred, and one gather runs after
the outermost step.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_patch.collectives.exchange import in_a_ring
from megatron_patch.megatron import patching
from megatron_patch.megatron.seams.intercept import intercepted_all_gathers
from megatron_patch.megatron.seams.traffic import (
    DIFFERENT,
    EDITED,
    FORCED,
    IN_STEP,
    NO_SHORTER,
    NOT_CODED,
    OFF,
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
    """Decides how a bucket group's next gather runs; three states are those within the optimizer's step."""

    IN_FULL = enum.auto()
    """The next gather is Megatron's own, of whole weights."""
    IN_STEP = enum.auto()
    """The step is running, in which the optimizer writes the own shard."""
    DEFERRED = enum.auto()
    """The step is running, and Megatron has asked for a gather, which will run after the step."""
    GATHERED = enum.auto()
    """The step is running, and the group was gathered in full since it began."""
    READY = enum.auto()
    """The next gather sends messages, which are encoded and on which all ranks have agreed."""


_WITHIN_STEP = (State.IN_STEP, State.DEFERRED, State.GATHERED)


class ChunkWeights:
    """The weight gathers of one model chunk: their seams, the batches in flight, and what was sent.

    Args:
        chunk: the DDP instance of Megatron; a wrapper without bucket groups, as torch's FSDP2, has no seams.
        session: the chunk's session, for its options and its workspace.
        kind: the class of the seams, a subclass of WeightSeam if the bucket groups are not DDP's.
    """

    def __init__(self, chunk: Any, session: Session, kind: type[WeightSeam] | None = None) -> None:
        dense, experts = (
            getattr(chunk, name, []) for name in ("bucket_groups", "expert_parallel_bucket_groups")
        )
        self.session = session
        self.raw_gathers: Counter[str] = Counter()
        """How often coded bucket groups were gathered in full since the start, by reason."""
        self.report: list[BucketReport] = []
        """One report for each bucket on what the last step's gathers sent."""
        self.in_flight: deque[BatchHandle] = deque()
        self.unchecked: list[BatchHandle] = []
        self.seams = [
            (kind or WeightSeam)(group, self, expert=place >= len(dense))
            for place, group in enumerate([*dense, *experts])
            if group.ddp_config.use_distributed_optimizer
        ]

    @property
    def nbytes(self) -> int:
        """Memory of old shards and messages, in bytes."""
        return sum(gather.nbytes for seam in self.seams for gather in seam.gathers)

    def start(self, batch: Batch, own_may_have_changed: bool) -> BatchHandle:
        """Start a gather; at most IN_FLIGHT run at a time, so that few messages are held in memory."""
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.popleft().wait()
        handle = batch.start(self.session.workspace, own_may_have_changed)
        self.in_flight.append(handle)
        self.unchecked.append(handle)
        return handle

    def end_step(self, continues: bool = False) -> None:
        """Make the report of what was sent since the last step ended.

        With `continues`, the step belongs to the last one, of another optimizer of the same model, and the
        reports are added.
        """
        new = [bucket for seam in self.seams for bucket in seam.take_report()]
        if continues:
            new = [before.with_more(more) for before, more in zip(self.report, new, strict=True)]
        self.report = new

    def check(self) -> None:
        """Check that all messages of the last gathers fitted. On CUDA this is not known before."""
        handles, self.unchecked = self.unchecked, []
        for handle in handles:
            handle.check()

    def detach(self) -> None:
        for seam in self.seams:
            seam.detach()


class WeightSeam:
    """Overrides `start_param_sync` of one bucket group until `detach`, and counts what all gathers send."""

    def __init__(self, bucket_group: Any, chunk: ChunkWeights, expert: bool) -> None:
        self.group = bucket_group
        self.expert = expert
        self.chunk = chunk
        self.ranks: dist.ProcessGroup = bucket_group.intra_distributed_optimizer_instance_group
        self.stock_because = stock_because(bucket_group, chunk.session.config)
        kind = "expert bucket" if expert else "bucket"
        names = [f"{kind} {bucket.bucket_id}" for bucket in bucket_group.buckets]
        self._reports = [BucketReport(name) for name in names]
        self.gathers = [
            WeightGather(bucket.param_data, self.ranks, chunk.session.workspace, name)
            for bucket, name in zip(bucket_group.buckets, names, strict=True)
            if self.stock_because is None
        ]
        self._state = State.IN_FULL
        self._behind = False
        """Whether the other ranks' copies of this rank's shard are older than the shard itself."""
        self._unknown = False
        """Whether a step has changed a shard that was not remembered, and none was gathered in full since."""
        self._why_raw = NOT_CODED
        self._detached = False
        self._original = bucket_group.start_param_sync

        @functools.wraps(self._original)
        def start_param_sync(force_sync: bool = False) -> None:
            if self._detached:  # Another override may still call this one.
                self._original(force_sync=force_sync)
                return
            chunk.session.memory.bring_back()
            self._start_param_sync(force_sync)

        self._override = patching.override(bucket_group, "start_param_sync", start_param_sync)

    def detach(self) -> None:
        self._detached = True
        self._override.undo()

    @property
    def _overlaps(self) -> bool:
        return bool(self.group.ddp_config.overlap_param_gather)

    @property
    def _defers(self) -> bool:
        """Whether a gather that is asked for inside the optimizer's step runs after it."""
        return not self._overlaps

    def take_report(self) -> list[BucketReport]:
        """Return the reports of what was sent since the last call."""
        taken = self._reports
        self._reports = [BucketReport(report.name) for report in taken]
        return taken

    def before_step(self) -> None:
        """Called before the optimizer's outermost step: remember the own shard, which it will overwrite."""
        if not self.gathers:
            return
        if isinstance(self.group.param_gather_handle, MessagesUnderWay):
            self.group.param_gather_handle.wait()
        if self._unknown or not self.chunk.session.choice.weights:
            # This step's gathers are Megatron's own, inside it and after it.
            self._state, self._why_raw, self._unknown = State.IN_FULL, OFF, True
            for gather in self.gathers:
                gather.forget()
            return
        if not self._behind:
            for gather in self.gathers:
                gather.remember()
        self._state = State.IN_STEP

    def step_failed(self) -> None:
        self._state = State.IN_FULL

    def step_ended(self) -> bool:
        """Called when the outermost step has ended; returns whether its weights must still be gathered."""
        waits = self._overlaps and self.group.param_gather_handle is None
        if self._state is State.DEFERRED or (self._state is State.IN_STEP and waits):
            return True
        self._state = State.IN_FULL
        return False

    def after_step(self, agreed: Sequence[Agreement]) -> bool:
        """Called when all ranks have agreed, for each bucket, whether its message may be sent.

        Returns whether a deferred gather must send the messages now; if they may not be sent, a deferred
        gather is run in full.
        """
        differ = any(bucket.difference for bucket in agreed)
        self._behind, asked = True, self._state is State.DEFERRED
        ready = not differ and all(bucket.saves for bucket in agreed)
        self._state = State.READY if ready else State.IN_FULL
        self._why_raw = DIFFERENT if differ else NO_SHORTER
        for report, gather in zip(self._reports, self.gathers, strict=True):
            report.traffic.add(in_a_ring((self.ranks.size() - 1) * _LENGTH_BYTES, 0.0, self.ranks))
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
            self._original(force_sync=True)  # The original only waits for the handle.
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
        self._behind, self._unknown, self._why_raw = False, False, NOT_CODED
        self._state = State.GATHERED if in_step else State.IN_FULL

    def _call_upstream(self) -> None:
        """Call Megatron's method without its collective; with overlap it still stores a handle."""
        with intercepted_all_gathers() as calls:
            self._original(force_sync=False)
        gathers = [(output.data_ptr(), output.numel()) for output in calls]
        if gathers != [(b.param_data.data_ptr(), b.param_data.numel()) for b in self.group.buckets]:
            raise RuntimeError(
                "megatron-loco: start_param_sync of megatron.core.distributed.param_and_grad_buffer did not "
                "ask for one all-gather of each bucket through dist_all_gather_func: weight_gather exact "
                "does not support this release of megatron-core"
            )
        self._state = State.IN_FULL

    def count(self, batch: Batch) -> None:
        for report, gather in zip(self._reports, self.gathers, strict=True):
            if gather in batch.gathers:
                elements = (self.ranks.size() - 1) * gather.shard_size
                report.traffic.add(in_a_ring(batch.nbytes_of(gather), elements, self.ranks))

    def gathered(self, handles: Sequence[BatchHandle]) -> None:
        """Called when a gather has ended and all ranks have the weights."""
        self._behind = False
        in_full = [gather for handle in handles if handle.in_full for gather in handle.batch.gathers]
        if any(gather in in_full for gather in self.gathers):
            self.chunk.raw_gathers[EDITED] += 1
        for report, bucket, gather in zip(self._reports, self.group.buckets, self.gathers, strict=True):
            if gather in in_full:
                report.traffic.add(stock_bucket_weights(self.group, bucket))


class MessagesUnderWay:
    """The messages of some bucket groups in flight; it also serves as Megatron's `param_gather_handle`.

    Args:
        seams: the seams of the bucket groups, all of one process group.
        chunk: the weight gathers that hold the messages.
        own_may_have_changed: as in Batch.start.
    """

    def __init__(self, seams: Sequence[WeightSeam], chunk: ChunkWeights, own_may_have_changed: bool) -> None:
        self._seams: Sequence[WeightSeam] = seams
        self._handles: list[BatchHandle] = []
        for batch in batches([gather for seam in seams for gather in seam.gathers]):
            self._handles.append(chunk.start(batch, own_may_have_changed))
            for seam in seams:
                seam.count(batch)

    def wait(self) -> None:
        """Wait for the messages and write the weights; a second call does nothing."""
        seams, self._seams = self._seams, ()
        for seam in seams:
            for handle in self._handles:
                handle.wait()
            seam.gathered(self._handles)


def gathered_after(chunks: Sequence[ChunkWeights], step: Callable[[], Any]) -> Any:
    """Run an optimizer's outermost step, with what the exact weight gather does before and after it.

    Args:
        chunks: the weight gathers of the chunks that the optimizer updates, in the same order on all ranks.
        step: the step, whose result is returned.
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
        with coming[0].chunk.session.waiting():
            _code([seam for seam in coming if seam.ranks is group], group)
    return result


def _code(seams: Sequence[WeightSeam], group: dist.ProcessGroup) -> None:
    agreed = agree([gather for seam in seams for gather in seam.gathers])
    for bucket in agreed:
        if bucket.difference and group.rank() == 0:
            logger.warning("megatron-loco: weights differ, gathered in full: %s", bucket.difference)
    of_seams = iter(agreed)
    now = [seam for seam in seams if seam.after_step([next(of_seams) for _ in seam.gathers])]
    if now:  # No user code has run since the weights were coded, so own_may_have_changed is False.
        MessagesUnderWay(now, now[0].chunk, own_may_have_changed=False).wait()
