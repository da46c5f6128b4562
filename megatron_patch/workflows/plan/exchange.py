"""Places the tasks of a pipeline stage's exchanges in the order in which Megatron and this package run them.

A bucket's exchange is a chain of tasks on streams:

    stock              collective                        | fp32 accumulation: all-to-all, sum, in turns
    low bits, flat     compress, all-to-all              | decompress and sum
    low bits, 2 hops   sum inside, compress, all-to-all  | decompress and sum
    1-bit Adam         form, compress, all-to-all, sum, compress, all-gather, decompress; one bucket at a time

The tasks after the bar run when the bucket is waited for: at the latest at the end, and before the bucket
after the next one begins (session/session.py, IN_FLIGHT). On GPUs compression has a stream of its own, which
waits for the first hop; on a CPU it runs in the rank's own thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_patch.workflows.plan import traffic
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import ALL, Bucket, Group, Job
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.plan.timeline import Task, Timeline
from megatron_patch.workflows.plan.traffic import Call

IN_FLIGHT = 2


@dataclass
class Sent:
    """The bytes that a rank of a stage sends in a step."""

    gradients_between: float = 0.0
    gradients_inside: float = 0.0
    weights_between: float = 0.0
    weights_inside: float = 0.0
    uplink: float = 0.0
    """Bytes that the whole node sends to other nodes."""


@dataclass
class Exchanges:
    """Places the tasks of one stage on the timeline that all stages share."""

    job: Job
    cluster: Cluster
    method: Method
    stage: int
    timeline: Timeline
    one_stream: bool = False
    """Whether each task waits for the one before it."""
    sent: Sent = field(default_factory=Sent)
    _under_way: dict[str, list[Handle]] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether collectives take processor time of the rank."""
        return bool(self.cluster.processor.transport)

    def work(self, name: str, seconds: float, after: Sequence[Task], stream: str) -> Task:
        """Place a task of the rank's processor."""
        beside = stream != "compute"  # Another stream of a GPU does not delay the one that computes.
        return self._place(name, {f"processor{self.stage}": seconds}, after, stream, at_once=beside)

    def _place(
        self,
        name: str,
        needs: dict[str, float],
        after: Sequence[Task],
        stream: str,
        latency: float = 0.0,
        at_once: bool = False,
    ) -> Task:
        on = "rank" if self.one_stream else f"{stream}{self.stage}"
        return self.timeline.place(name, needs, after, on, latency, at_once)

    def side(self, kind: str) -> str:
        """Return the stream on which a bucket is compressed and decompressed."""
        return f"exchange {kind} " if self.job.overlap_gradients and not self.on_cpu else "compute"

    def send(
        self, name: str, call: Call, group: Group, after: Sequence[Task], stream: str, weights: bool = False
    ) -> Task:
        """Place a collective of a group, and count its bytes as those of weights or of gradients."""
        if weights:
            self.sent.weights_between += call.between(group)
            self.sent.weights_inside += call.inside
        else:
            self.sent.gradients_between += call.between(group)
            self.sent.gradients_inside += call.inside
        self.sent.uplink += call.uplink
        processor = self.cluster.processor
        needs = {
            f"uplink{self.stage}": call.uplink / self.cluster.between.efficiency.get(call.kind, 1.0),
            f"inside{self.stage}": call.inside / self.cluster.inside.efficiency.get(call.kind, 1.0),
        }
        if self.on_cpu:
            cost = processor.transport.get((call.scope, call.kind), processor.transport[ALL, call.kind])
            needs[f"processor{self.stage}"] = cost.seconds(call.sent, call.calls)
        return self._place(name, needs, after, stream, call.latency)

    def pass_on(self, times: int, after: Sequence[Task]) -> list[Task]:
        """Place `times` sends of a microbatch's activations, or their gradients, to a neighbouring stage."""
        if not times:
            return list(after)
        nbytes = times * self.job.passed_bytes
        if self.job.passes_between_nodes(self.cluster):
            needs = {f"uplink{self.stage}": nbytes * min(self.cluster.per_node, self.cluster.world)}
            latency = self.cluster.between.latency
        else:
            needs, latency = {f"inside{self.stage}": nbytes}, self.cluster.inside.latency
        waited = times * (self.cluster.call_latency + latency)
        # These are small, and share the link with buckets that may be on it rather than wait for them.
        return [self._place("to another stage", needs, after, "passed", waited, at_once=True)]

    # --- gradients ---------------------------------------------------------------------------------------

    def start(self, bucket: Bucket, ready: Sequence[Task], number: int) -> None:
        """Start the gradient exchange of a bucket that is complete when the tasks in `ready` have ended."""
        group = self.job.group(self.cluster, bucket.expert)
        if group.ranks == 1 or self.method.free or self.method.momentum:
            return
        kind = "experts" if bucket.expert else "dense"
        name = f"{kind} bucket {number}"
        if self.method.bits is None:
            self._start_stock(bucket, group, ready, kind, name)
            return
        under_way = self._under_way.setdefault(kind, [])
        for handle in [handle for handle in under_way if not handle.done][: 1 - IN_FLIGHT]:
            self.end(handle)
        handle = self.start_low(
            bucket, group, ready, kind, name, back=not self.method.shards_optimizer(self.job)
        )
        under_way.append(handle)

    def finish(self) -> None:
        """Place the remaining tasks of all exchanges, in order."""
        for handles in self._under_way.values():
            for handle in handles:
                if not handle.done:
                    self.end(handle)

    def _start_stock(self, bucket: Bucket, group: Group, ready: Sequence[Task], kind: str, name: str) -> None:
        job, processor, elements = self.job, self.cluster.processor, bucket.elements
        if not self.method.shards_optimizer(self.job):
            before = list(ready)
            for call in traffic.all_reduce(
                elements, self.method.bytes_of_gradient(self.job), group, self.cluster
            ):
                before = [self.send(f"{name}: {call.kind}", call, group, before, f"network {kind} ")]
            return
        summed = job.fp32_accumulation
        call = traffic.stock_reduce(
            elements, self.method.bytes_of_gradient(self.job), group, self.cluster, summed
        )
        if not summed:
            self.send(f"{name}: {call.kind}", call, group, ready, f"network {kind} ")
            return
        # Megatron drains each before the next begins (previous_grad_reduce_bucket_group).
        under_way = self._under_way.setdefault(kind, [])
        for handle in [handle for handle in under_way if not handle.done]:
            self.end(handle)
        after = [*ready, *(handle.last for handle in under_way[-1:])]
        sent = self.send(f"{name}: all-to-all", call, group, after, f"network {kind} ")
        seconds = processor.stock_sum.seconds(elements)
        under_way.append(Handle(sent, f"{name}: sum", seconds, self.side(kind), sent))

    def start_low(
        self, bucket: Bucket, group: Group, ready: Sequence[Task], kind: str, name: str, *, back: bool
    ) -> Handle:
        """Start a bucket's low-bit exchange; `back` returns the sums to all ranks, as an all-reduce does."""
        method, processor, side = self.method, self.cluster.processor, self.side(kind)
        assert method.bits is not None
        elements, senders, over = bucket.elements, group.ranks, group
        before: Sequence[Task] = ready
        if self.method.two_hops(group):
            before = [self._inside(bucket, group, ready, side, name)]
            elements, senders, over = bucket.elements // group.local, group.nodes, traffic.across(group)
        shard = bucket.elements // group.ranks
        size = traffic.payload(shard * senders, senders, method.bits, bucket.exact * senders // group.ranks)
        compressed = self.work(
            f"{name}: compress", processor.compress_work(method.bits).seconds(elements), before, side
        )
        call = traffic.all_to_all(size, over, self.cluster)
        sent = self.send(f"{name}: all-to-all", call, over, [compressed], f"network {kind} ")
        summing = processor.decompress.seconds(shard * senders)
        if back:
            own = processor.compress_work(method.bits).seconds(shard)
            summed = self.work(f"{name}: sum", summing + own, [sent], side)
            sums = traffic.gather(size, over, self.cluster)
            sent = self.send(f"{name}: all-gather", sums, over, [summed], f"network {kind} ")
            summing = processor.decompress.seconds(elements)
            if over is not group:
                here = traffic.inside_of(group)
                around = traffic.gather(size * group.nodes, here, self.cluster)
                sent = self.send(f"{name}: around the node", around, here, [sent], f"network {kind} ")
                summing = processor.decompress.seconds(bucket.elements)
        return Handle(sent, f"{name}: decompress", summing, side, sent)

    def _inside(
        self, bucket: Bucket, group: Group, ready: Sequence[Task], side: str, name: str, nbytes: float = 0.0
    ) -> Task:
        """Place the first hop, in which the node's ranks sum; the stream waits for it."""
        here, processor = traffic.inside_of(group), self.cluster.processor
        shard = bucket.elements // group.local
        if self.method.intra_bits is None:
            # There is one collective for each node's part of the bucket.
            call = dataclasses.replace(
                traffic.stock_reduce(
                    bucket.elements,
                    int(nbytes or self.method.bytes_of_gradient(self.job)),
                    here,
                    self.cluster,
                    False,
                ),
                calls=1 if self.method.momentum else group.nodes,
            )
            return self.send(f"{name}: sum inside", call, here, ready, side)
        bits = self.method.intra_bits
        seconds = processor.compress_work(bits).seconds(bucket.elements)
        compressed = self.work(f"{name}: compress inside", seconds, ready, side)
        call = traffic.all_to_all(
            traffic.payload(bucket.elements, group.local, bits, bucket.exact), here, self.cluster
        )
        sent = self.send(f"{name}: all-to-all inside", call, here, [compressed], side)
        return self.work(f"{name}: sum", processor.decompress.seconds(shard * group.local), [sent], side)

    def end(self, handle: Handle) -> None:
        """Place the remaining task of a bucket."""
        handle.last = self.work(handle.name, handle.seconds, [handle.sent], handle.side)
        handle.done = True

    # --- momentum ----------------------------------------------------------------------------------------

    def momentum(self, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
        """Place 1-bit Adam's exchange in the optimizer's step, one bucket after the other."""
        processor, before = self.cluster.processor, list(after)
        for number, bucket in enumerate(buckets):
            group, elements = self.job.group(self.cluster, bucket.expert), bucket.elements
            name = f"momentum bucket {number}"
            before = [self.work(f"{name}: form", processor.momentum.seconds(elements), before, "compute")]
            if group.ranks == 1:
                continue
            over = group
            if self.method.two_hops(group):
                before = [self._inside(bucket, group, before, "compute", name, nbytes=4)]
                over, elements = traffic.across(group), bucket.elements // group.local
            size = traffic.payload(elements, over.ranks, 1, whole_blocks=True)
            coded = processor.compress_work(1).seconds(elements)
            before = [self.work(f"{name}: compress", coded, before, "compute")]
            there = traffic.all_to_all(size, over, self.cluster)
            before = [self.send(f"{name}: all-to-all", there, over, before, "compute")]
            own = elements // over.ranks
            summing = processor.decompress.seconds(elements) + processor.compress_work(1).seconds(own)
            before = [self.work(f"{name}: sum", summing, before, "compute")]
            back = traffic.gather(size, over, self.cluster)
            before = [self.send(f"{name}: all-gather", back, over, before, "compute")]
            if over is not group:
                here = traffic.inside_of(group)
                around = traffic.gather(size * group.nodes, here, self.cluster)
                before = [self.send(f"{name}: around the node", around, here, before, "compute")]
            shared = processor.decompress.seconds(bucket.elements)
            before = [self.work(f"{name}: decompress", shared, before, "compute")]
        return before


@dataclass
class Handle:
    """A bucket whose collective is in flight, with the task that remains when it is waited for."""

    sent: Task
    name: str
    seconds: float
    side: str
    last: Task
    done: bool = False


_MOMENTS = 8


def bytes_of(job: Job, cluster: Cluster, method: Method) -> float:
    """Return the bytes of state, buffers and activations of the stage that needs most."""
    return job.activation_bytes + max(
        _state(job, cluster, method, stage) + _buffers(job, cluster, method, stage)
        for stage in range(job.pipeline)
    )


def _state(job: Job, cluster: Cluster, method: Method, stage: int) -> float:
    total = 0.0
    for expert in (False, True):
        group, elements = job.group(cluster, expert), job.stages[stage].numel(expert)
        owners = group.ranks if method.shards_optimizer(job) else 1
        master = 4 if job.weight_bytes == 2 else 0
        each = job.weight_bytes + method.bytes_of_gradient(job) + (_MOMENTS + master) / owners
        if method.exact and method.shards_optimizer(job) and group.ranks > 1:
            each += 4 / group.ranks  # The old shard takes 2 bytes, and messages take 2 at most.
        if method.keeps_errors and group.ranks > 1:
            each += traffic.ERROR / (group.local if method.two_hops(group) else 1)
        if method.momentum:
            each += 4 + traffic.ERROR / group.ranks
        total += elements * each
    return total


def _buffers(job: Job, cluster: Cluster, method: Method, stage: int) -> float:
    if method.bits is None:
        return 0.0
    total = 0.0
    for expert in (False, True):
        group = job.group(cluster, expert)
        if group.ranks == 1:
            continue
        largest = sorted((bucket.elements for bucket in job.buckets(stage, cluster, expert)), reverse=True)
        hops = method.two_hops(group)
        for place, elements in enumerate(largest[:IN_FLIGHT]):
            share = elements // group.local if hops else elements
            shards = group.nodes if hops else group.ranks
            total += 2 * shards * traffic.payload(share, shards, method.bits)
            if hops and place == 0:
                total += share * (4 if method.intra_bits else method.bytes_of_gradient(job))
    return total
