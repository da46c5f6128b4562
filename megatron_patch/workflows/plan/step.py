"""Simulates one training step of a job on a cluster: how long it takes with a method, and where time goes.

All ranks of a stage do the same at the same time, so that one rank of each stage is simulated (it shares the
uplink with the ranks of its node). The step follows Megatron's 1F1B schedule:

    first forward      with overlap_param_gather it waits for each bucket's weights, and asks for the next
    the rest           all other passes are one task, in which nothing is exchanged
    last backward      with overlap_grad_reduce each bucket's exchange starts with its last gradient
    optimizer          it starts once all stages' exchanges have ended and the norm is known, and contains
                       1-bit Adam's exchange
    gather             without overlap the weights are gathered here

A stage waits for the stage before it in its first forward pass, and for the stage after it in its last
backward pass, which makes the pipeline's bubble; with v virtual stages it waits only for the first v-th of
the pass. What stages send each other, both ways at once, adds to each microbatch; with virtual stages
Megatron hides it behind computing. A bucket's exchange is a chain of tasks on streams:

    stock              collective                        | fp32 accumulation: all-to-all, sum, in turns
    low bits, flat     compress, all-to-all              | decompress and sum
    low bits, 2 hops   sum inside, compress, all-to-all  | decompress and sum
    1-bit Adam         form, compress, all-to-all, sum, compress, all-gather, decompress; one bucket at a time

The tasks after the bar run when the bucket is waited for: at the latest at the end, and before the bucket
after the next one begins (session/session.py, IN_FLIGHT). Compression has a stream of its own, which waits
for the first hop, unless a cluster's ranks exchange in their own threads (`Cluster.one_stream`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from megatron_patch.workflows.plan.cluster import Call, Cluster, Group
from megatron_patch.workflows.plan.job import Bucket, Job
from megatron_patch.workflows.plan.methods import FREE, Method

IN_FLIGHT = 2
_BACKWARD = 2.0
"""How many times the operations of the forward pass the backward pass takes."""
_LENGTHS_BYTES = 24
_BLOCK = 128
_MOMENTS = 8
ERROR = 1 + 2 / _BLOCK
"""Bytes per element of an 8-bit error state with a bf16 scale for each block."""


@functools.cache
def payload(elements: int, shards: int, bits: int, exact: int = 0, whole_blocks: bool = False) -> float:
    """Return the bytes of one shard's payload, with its share of the `exact` elements, sent in fp32."""
    from megatron_patch.quantization.layout import BlockLayout  # imports torch, which --help does not need

    layout = BlockLayout.of(elements, shards, bits, _BLOCK, whole_blocks)
    return layout.payload_bytes + (4 - bits / 8) * exact / shards


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a step, with its times in seconds from the beginning of the step."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The time from its start to its end, including waits for resources."""
        return self.end - self.start


@dataclass
class Timeline:
    """The tasks of a step in the order in which they were placed, each with its times from then on.

    A task waits for other tasks, for the one before it on its stream, and for a latency of its own. Then it
    uses links and the rank's processor, each of which serves one task after the other; `capacity` says what
    each does in a second. Two tasks never share a link: one after the other, they take as long in sum as they
    would together, and the first one ends earlier.
    """

    capacity: Mapping[str, float]
    tasks: list[Task] = field(default_factory=list)
    _streams: dict[str, float] = field(default_factory=dict)
    _busy: dict[str, float] = field(default_factory=dict)

    def place(
        self,
        name: str,
        needs: Mapping[str, float],
        after: Sequence[Task],
        stream: str = "",
        latency: float = 0.0,
        at_once: bool = False,
    ) -> Task:
        """Place a task that needs amounts of resources (processor seconds, bytes of a link).

        With `at_once` it does not wait for tasks that use its resources; tasks placed after it wait longer.
        """
        start = max([self._streams.get(stream, 0.0), *(task.end for task in after)])
        begun = end = start + latency
        for resource, amount in needs.items():
            if amount > 0:
                busy, seconds = self._busy.get(resource, 0.0), amount / self.capacity[resource]
                self._busy[resource] = busy + seconds if at_once else max(busy, begun) + seconds
                end = max(end, begun + seconds if at_once else self._busy[resource])
        if stream:
            self._streams[stream] = end
        self.tasks.append(Task(name, start, end))
        return self.tasks[-1]

    @property
    def end(self) -> float:
        """The time at which the last task ends."""
        return max((task.end for task in self.tasks), default=0.0)


@dataclass
class Sent:
    """The bytes that a rank of a stage sends in a step."""

    gradients_between: float = 0.0
    gradients_inside: float = 0.0
    weights_between: float = 0.0
    weights_inside: float = 0.0
    uplink: float = 0.0
    """Bytes that the whole node sends to other nodes."""


@dataclass(frozen=True)
class Step:
    """The simulated time and traffic of one step."""

    seconds: float
    exposed: float
    """The seconds that communication adds to the step."""
    sent: tuple[Sent, ...]
    """What one rank of each stage sends."""
    tasks: tuple[Task, ...] = ()

    @property
    def uplink_bytes(self) -> float:
        """Bytes that the busiest node sends to others."""
        return max(sent.uplink for sent in self.sent)


@dataclass(frozen=True)
class Handle:
    """A bucket whose collective `sent` is in flight, with the task that remains when it is waited for."""

    sent: Task
    name: str
    seconds: float
    stream: str


@dataclass
class Exchanges:
    """Places the tasks of one stage on the timeline that all stages share, in the order in which they run."""

    job: Job
    cluster: Cluster
    method: Method
    stage: int
    timeline: Timeline
    one_stream: bool = False
    """Whether each task waits for the one before it."""
    sent: Sent = field(default_factory=Sent)
    _under_way: dict[str, list[Handle]] = field(default_factory=dict)

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
        of_stage = {f"{resource}{self.stage}": amount for resource, amount in needs.items()}
        return self.timeline.place(name, of_stage, after, on, latency, at_once)

    def work(self, name: str, seconds: float, after: Sequence[Task], stream: str = "compute") -> Task:
        """Place a task of the rank's processor."""
        beside = stream != "compute"  # Another stream of a GPU does not delay the one that computes.
        return self._place(name, {"processor": seconds}, after, stream, at_once=beside)

    def send(self, name: str, call: Call, after: Sequence[Task], stream: str, weights: bool = False) -> Task:
        """Place a collective, and count its bytes as those of weights or of gradients."""
        if weights:
            self.sent.weights_between += call.between
            self.sent.weights_inside += call.inside
        else:
            self.sent.gradients_between += call.between
            self.sent.gradients_inside += call.inside
        self.sent.uplink += call.uplink
        needs = self.cluster.needs(call)
        return self._place(f"{name}: {call.kind}", needs, after, stream, call.latency)

    def pass_on(self, times: int, after: Sequence[Task]) -> list[Task]:
        """Place `times` sends of a microbatch's activations, or their gradients, to a neighbouring stage."""
        if not times:
            return list(after)
        nbytes = times * self.job.passed_bytes
        if self.job.passes_between_nodes(self.cluster):
            needs = {"uplink": nbytes * min(self.cluster.per_node, self.cluster.world)}
            latency = self.cluster.between.latency
        else:
            needs, latency = {"inside": nbytes}, self.cluster.inside.latency
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
        sharded, name = self.method.shards_optimizer(self.job), f"{kind} bucket {number}"
        if self.method.bits is not None:
            self._wait(kind, IN_FLIGHT - 1)
            handle = self.start_low(bucket, group, ready, kind, name, back=not sharded)
            self._under_way[kind].append(handle)
        elif sharded:
            self._reduce_scatter(bucket, group, ready, kind, name)
        else:
            nbytes = self.method.bytes_of_gradient(self.job)
            for call in self.cluster.all_reduce(bucket.elements, nbytes, group):
                ready = [self.send(name, call, ready, f"network {kind} ")]

    def _wait(self, kind: str, left: int) -> list[Task]:
        """Place, and return, the remaining tasks of the oldest buckets under way: all but `left` of them."""
        under_way = self._under_way.setdefault(kind, [])
        return [self.end(under_way.pop(0)) for _ in range(len(under_way) - left)]

    def end(self, handle: Handle) -> Task:
        """Place the remaining task of a bucket."""
        return self.work(handle.name, handle.seconds, [handle.sent], handle.stream)

    def finish(self) -> None:
        """Place the remaining tasks of all exchanges, in order."""
        for kind in self._under_way:
            self._wait(kind, 0)

    def _side(self, kind: str) -> str:
        """Return the stream on which a bucket is compressed and decompressed."""
        beside = self.job.overlap_gradients and not self.cluster.one_stream
        return f"exchange {kind} " if beside else "compute"

    def _reduce_scatter(
        self, bucket: Bucket, group: Group, ready: Sequence[Task], kind: str, name: str
    ) -> None:
        """Start Megatron's own reduction of a bucket to the shards' owners."""
        summed, nbytes = self.job.fp32_accumulation, self.method.bytes_of_gradient(self.job)
        call = self.cluster.stock_reduce(bucket.elements, nbytes, group, summed)
        if not summed:
            self.send(name, call, ready, f"network {kind} ")
            return
        # Megatron drains each before the next begins (previous_grad_reduce_bucket_group).
        sent = self.send(name, call, [*ready, *self._wait(kind, 0)], f"network {kind} ")
        seconds = self.cluster.processor.stock_sum * bucket.elements
        self._under_way[kind].append(Handle(sent, f"{name}: sum", seconds, self._side(kind)))

    def start_low(
        self, bucket: Bucket, group: Group, ready: Sequence[Task], kind: str, name: str, *, back: bool
    ) -> Handle:
        """Start a bucket's low-bit exchange; `back` returns the sums to all ranks, as an all-reduce does."""
        method, cluster, processor = self.method, self.cluster, self.cluster.processor
        side, network = self._side(kind), f"network {kind} "
        assert method.bits is not None
        elements, over = bucket.elements, group
        if method.two_hops(group):
            ready = [self._inside(bucket, group, ready, side, name)]
            elements, over = bucket.elements // group.local, group.across
        shard = bucket.elements // group.ranks
        # 1-bit Adam's momentum has vectors in it, too, and blocks that no shard cuts.
        exact = 0 if method.momentum else bucket.exact * over.ranks // group.ranks
        size = payload(shard * over.ranks, over.ranks, method.bits, exact, whole_blocks=method.momentum)
        coding = processor.compress.get(method.bits, processor.compress.get(0, 0.0))
        ready = [self.work(f"{name}: compress", coding * elements, ready, side)]
        sent = self.send(name, cluster.all_to_all(size, over), ready, network)
        summing = processor.decompress * (shard * over.ranks)
        if back:
            summed = self.work(f"{name}: sum", summing + coding * shard, [sent], side)
            sent = self.send(name, cluster.gather(size, over), [summed], network)
            if over is not group:
                sent = self.send(name, cluster.gather(size * group.nodes, group.inside), [sent], network)
            summing = processor.decompress * bucket.elements
        return Handle(sent, f"{name}: decompress", summing, side)

    def _inside(self, bucket: Bucket, group: Group, ready: Sequence[Task], side: str, name: str) -> Task:
        """Place the first hop, in which the node's ranks sum; the stream waits for it."""
        momentum = self.method.momentum
        nbytes = 4 if momentum else self.method.bytes_of_gradient(self.job)
        call = self.cluster.stock_reduce(bucket.elements, nbytes, group.inside, fp32_sum=False)
        # There is one collective for each node's part of the bucket.
        call = dataclasses.replace(call, calls=1 if momentum else group.nodes)
        return self.send(f"{name} inside", call, ready, side)

    def momentum(self, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
        """Place 1-bit Adam's exchange in the optimizer's step, one bucket after the other."""
        before = list(after)
        for number, bucket in enumerate(buckets):
            group, name = self.job.group(self.cluster, bucket.expert), f"momentum bucket {number}"
            seconds = self.cluster.processor.momentum * bucket.elements
            before = [self.work(f"{name}: form", seconds, before)]
            if group.ranks > 1:
                before = [self.end(self.start_low(bucket, group, before, "momentum", name, back=True))]
        return before

    # --- weights -----------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether the ranks gather updated weights."""
        return self.method.shards_optimizer(self.job) and not self.method.free

    def encode(self, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
        """Place what the exact gather does after the optimizer's step: encode messages, gather lengths."""
        before = list(after)
        for expert in (False, True) if self.gathers and self.method.exact else ():
            of_group = [bucket for bucket in buckets if bucket.expert == expert]
            group = self.job.group(self.cluster, expert)
            if not of_group or group.ranks == 1:
                continue
            processor = self.cluster.processor
            owned = sum(bucket.elements for bucket in of_group) / group.ranks
            whole = owned * (group.ranks - 1)
            seconds = processor.weight_encode * owned + processor.weight_sums * whole
            coded = self.work("weights: encode", seconds, before)
            lengths = self.cluster.gather(_LENGTHS_BYTES * len(of_group), group)
            before = [self.send("weights: lengths", lengths, [coded], "network weights ", weights=True)]
        return before

    def gather(self, batch: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
        """Place one gather of buckets of one group; the returned tasks end when the weights are written."""
        expert = batch[0].expert
        group = self.job.group(self.cluster, expert)
        if not self.gathers or group.ranks == 1:
            return list(after)
        elements = sum(bucket.elements for bucket in batch)
        bits = self.job.bits_of_weights if self.method.exact else 8.0 * self.job.weight_bytes
        call = self.cluster.gather(elements / group.ranks * bits / 8, group)
        stream = "network experts' weights " if expert else "network weights "
        sent = self.send("weights", call, after, stream, weights=True)
        if not self.method.exact:
            return [sent]
        seconds = self.cluster.processor.weight_decode * (elements * (1 - 1 / group.ranks))
        return [self.work("weights: decode", seconds, [sent])]

    def batches(self, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
        """Split buckets whose gathers begin together into the batches that are sent (weights/batch.py)."""
        batches: list[list[Bucket]] = []
        for expert in (False, True):
            of_group = [bucket for bucket in buckets if bucket.expert == expert]
            room = max((bucket.elements * self.job.weight_bytes for bucket in of_group), default=0)
            batch: list[Bucket] = []
            for bucket in of_group:
                nbytes = sum(b.elements for b in [*batch, bucket]) * self.job.bits_of_weights / 8
                if batch and (not self.method.exact or nbytes > room):
                    batches.append(batch)
                    batch = []
                batch.append(bucket)
            batches += [batch] if batch else []
        return batches


# --- Megatron's step --------------------------------------------------------------------------------------


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate a step in the middle of training, with the gather that overlaps its first forward pass."""
    stages = _placed(job, cluster, method)
    timeline = stages[0].timeline
    alone = seconds = timeline.end
    if not method.free:
        free = dataclasses.replace(FREE, distributed=method.distributed)
        alone = _placed(job, cluster, free)[0].timeline.end
    sent = tuple(stage.sent for stage in stages)
    return Step(seconds, max(0.0, seconds - alone), sent, tuple(timeline.tasks))


def capacity(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return what each resource of each stage does in a second (processor seconds, bytes of links)."""
    links = {"uplink": cluster.between.bandwidth, "inside": cluster.inside.bandwidth}
    of_each = {"processor": 1.0, **links}
    return {f"{name}{stage}": rate for stage in range(job.pipeline) for name, rate in of_each.items()}


def forward_seconds(job: Job, cluster: Cluster, operations: float) -> float:
    """Return the seconds of one microbatch's forward pass that takes `operations` for each token."""
    tokens = job.micro_batch * job.sequence / job.context
    return operations * tokens / cluster.processor.flops


def norm_latency(cluster: Cluster) -> float:
    """Return the seconds of the small all-reduce of the gradients' norm over all ranks, by a tree."""
    turns = 2 * ceil(log2(cluster.nodes)) if cluster.nodes > 1 else 0
    return cluster.call_latency + turns * cluster.between.latency


def _placed(job: Job, cluster: Cluster, method: Method) -> list[Exchanges]:
    timeline = Timeline(capacity(job, cluster))
    stages = [Exchanges(job, cluster, method, stage, timeline) for stage in range(job.pipeline)]
    buckets = [
        [bucket for expert in (False, True) for bucket in job.buckets(stage, cluster, expert)]
        for stage in range(job.pipeline)
    ]
    backward = _BACKWARD + (1 if job.recompute else 0)
    rest = job.microbatches(cluster.world) - 1
    previous: list[Task] = []
    forwards: list[list[Task]] = []
    for number, stage in enumerate(stages):
        done = _first_forward(stage, buckets[number], previous)
        previous = stage.pass_on(int(number < job.pipeline - 1), [_at(done, 1 / job.virtual)])
        forwards.append(done)
    middles = []
    for number, stage in enumerate(stages):
        seconds = rest * (1 + backward) * forward_seconds(job, cluster, job.stages[number].operations)
        middle = stage.work("other microbatches", seconds, forwards[number][-1:])
        neighbours = (number > 0) + (number < job.pipeline - 1)
        beside = forwards[number][-1:] if job.virtual > 1 else [middle]
        middles.append([middle, *stage.pass_on(rest * neighbours * job.virtual, beside)])
    previous = []
    for number in reversed(range(job.pipeline)):
        stage = stages[number]
        done = _last_backward(stage, buckets[number], backward, [*middles[number], *previous])
        previous = stage.pass_on(int(number > 0), [_at(done, 1 / job.virtual)])
        if not job.overlap_gradients or job.after_backward:
            for place, bucket in enumerate(buckets[number]):
                stage.start(bucket, done[-1:], place)
        stage.finish()
    ready = timeline.place("all gradients", {}, list(timeline.tasks), latency=norm_latency(cluster))
    for number, stage in enumerate(stages):
        _optimizer(stage, buckets[number], ready)
    return stages


def _at(pieces: Sequence[Task], share: float) -> Task:
    """Return the first piece at whose end this share of a pass is done."""
    whole = sum(task.seconds for task in pieces)
    done = 0.0
    for task in pieces:
        done += task.seconds
        if done >= share * whole * (1 - 1e-9):
            return task
    return pieces[-1]


def _compute(
    stage: Exchanges, name: str, operations: float, done: list[Task], after: Sequence[Task]
) -> list[Task]:
    """Place a part of a pass, and add it to `done`; the first one is cut into the virtual stages."""
    pieces = 1 if done else stage.job.virtual
    before = list(after)
    for _ in range(pieces):
        seconds = forward_seconds(stage.job, stage.cluster, operations / pieces)
        before = [stage.work(name, seconds, before)]
        done += before
    return before


def _first_forward(stage: Exchanges, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
    """Place the stage's first forward pass, and the gathers for which it waits."""
    job = stage.job
    # The forward pass needs a bucket at its first parameter.
    due = {(bucket.expert, bucket.first): bucket for bucket in buckets if job.overlap_weights}
    seen: Counter[bool] = Counter()
    done: list[Task] = []
    operations = 0.0
    before = list(after)
    last_gather: dict[bool, list[Task]] = {}
    for parameter in job.stages[stage.stage].parameters:
        bucket = due.get((parameter.expert, seen[parameter.expert]))
        seen[parameter.expert] += 1
        if bucket is not None and stage.gathers:
            if operations:
                seconds = forward_seconds(job, stage.cluster, operations)
                before = [stage.work("forward", seconds, before)]
                done += before
                operations = 0.0
            # A gather starts when the bucket before it is waited for, the first one when it is needed.
            arrived = stage.gather([bucket], last_gather.get(parameter.expert) or before)
            last_gather[parameter.expert] = arrived
            before = [*before, *arrived]
        operations += parameter.operations
    _compute(stage, "forward", operations, done, before)
    return done


def _last_backward(
    stage: Exchanges, buckets: Sequence[Bucket], backward: float, after: Sequence[Task]
) -> list[Task]:
    """Place the stage's last backward pass; with overlap each bucket's exchange starts within it."""
    job = stage.job
    parameters = job.stages[stage.stage].parameters
    left = Counter(parameter.expert for parameter in parameters)
    completes = {(bucket.expert, bucket.first): place for place, bucket in enumerate(buckets)}
    done: list[Task] = []
    operations = 0.0
    before = list(after)
    for parameter in reversed(parameters):
        left[parameter.expert] -= 1
        operations += backward * parameter.operations
        place = completes.get((parameter.expert, left[parameter.expert]))
        if place is None:
            continue
        before = _compute(stage, "backward", operations, done, before)
        operations = 0.0
        if job.overlap_gradients and not job.after_backward:
            stage.start(buckets[place], done[-1:], place)
    return done


def _optimizer(stage: Exchanges, buckets: Sequence[Bucket], ready: Task) -> None:
    """Place a stage's optimizer step, with 1-bit Adam's exchange, and the gather if it is not overlapped."""
    processor, job, method = stage.cluster.processor, stage.job, stage.method
    before = stage.momentum(buckets, [ready]) if method.momentum else [ready]
    owned = 0.0
    for bucket in buckets:
        ranks = job.group(stage.cluster, bucket.expert).ranks if method.shards_optimizer(job) else 1
        owned += bucket.elements / ranks
    before = [stage.work("optimizer", processor.optimizer * owned + processor.step, before)]
    before = stage.encode(buckets, before)
    for batch in stage.batches(buckets) if not job.overlap_weights else ():
        before = stage.gather(batch, before)


# --- memory -----------------------------------------------------------------------------------------------


def added_bytes(job: Job, cluster: Cluster, method: Method) -> float:
    """Return how many bytes of memory a method adds to stock's, on a rank of the stage with most."""
    return max(
        sum(_added(job, cluster, method, stage, expert) for expert in (False, True))
        for stage in range(job.pipeline)
    )


def _added(job: Job, cluster: Cluster, method: Method, stage: int, expert: bool) -> float:
    group = job.group(cluster, expert)
    numel = sum(parameter.numel for parameter in job.stages[stage].of(expert))
    sharded = method.shards_optimizer(job)
    kept = _MOMENTS + (4 if job.weight_bytes == 2 else 0)
    each = float(method.bytes_of_gradient(job) - job.gradient_bytes)
    each += kept / (group.ranks if sharded else 1) - kept / (group.ranks if job.distributed else 1)
    if method.exact and sharded and group.ranks > 1:
        each += 4 / group.ranks  # The old shard takes 2 bytes, and messages take 2 at most.
    if method.momentum:
        each += 4
    buckets = [bucket.elements for bucket in job.buckets(stage, cluster, expert)]
    nbytes, back = method.bytes_of_gradient(job), method.momentum or not sharded
    return each * numel + held(method, group, numel, buckets, nbytes, back=back)


def held(
    method: Method, group: Group, numel: float, buckets: Sequence[int], nbytes: int, *, back: bool
) -> float:
    """Return the bytes of errors for `numel` elements, and of the buffers of the largest buckets in flight.

    `nbytes` is what an element of the buffer takes in which a node's ranks sum first; `back` says that the
    sums return to all ranks, for which each owner has an error and a buffer in fp32.
    """
    if method.bits is None or group.ranks == 1 or not buckets:
        return 0.0
    hops = method.two_hops(group)
    part, shards = (group.local, group.nodes) if hops else (1, group.ranks)
    largest = [elements // part for elements in sorted(buckets, reverse=True)[:IN_FLIGHT]]
    total = 2 * shards * sum(payload(elements, shards, method.bits) for elements in largest)
    total += 12 / _BLOCK * numel / part  # BlockTable.on
    total += largest[0] * nbytes if hops else 0
    total += 4 * sum(largest) / shards if back else 0
    errors = ERROR * numel * (1 / part + (1 / group.ranks if back else 0))
    return total + (errors if method.keeps_errors else 0)
