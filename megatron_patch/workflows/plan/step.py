"""Simulates one training step of a job on a cluster: how long it takes with a method, and where time goes.

All ranks of a stage do the same at the same time, so that one rank of each stage is simulated (it shares the
uplink with the ranks of its node, and on a CPU the cores). The step follows Megatron's 1F1B schedule:

    first forward      with overlap_param_gather it waits for each bucket's weights, and asks for the next
    the rest           all other passes are one task, in which nothing is exchanged
    last backward      with overlap_grad_reduce each bucket's exchange starts with its last gradient
    optimizer          it starts once all stages' exchanges have ended and the norm is known, and contains
                       1-bit Adam's exchange
    gather             without overlap the weights are gathered here

A stage waits for the stage before it in its first forward pass, and for the stage after it in its last
backward pass, which makes the pipeline's bubble; with v virtual stages it waits only for the first v-th of
the pass. What stages send each other, both ways at once, adds to each microbatch; with virtual stages
Megatron hides it behind computing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patch.workflows.plan import traffic
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.exchange import Exchanges, Sent
from megatron_patch.workflows.plan.job import Bucket, Job
from megatron_patch.workflows.plan.methods import FREE, Method
from megatron_patch.workflows.plan.timeline import Task, Timeline

_BACKWARD = 2.0
"""How many times the operations of the forward pass the backward pass takes."""
_LENGTHS_BYTES = 24


@dataclass(frozen=True)
class Step:
    """The simulated time and traffic of one step."""

    method: Method
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


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate a step in the middle of training, with the gather that overlaps its first forward pass."""
    made = _placed(job, cluster, method)
    timeline = made[0].timeline
    alone = seconds = timeline.end
    if not method.free:
        free = dataclasses.replace(FREE, distributed=method.distributed)
        alone = _placed(job, cluster, free)[0].timeline.end
    sent = tuple(maker.sent for maker in made)
    return Step(method, seconds, max(0.0, seconds - alone), sent, tuple(timeline.tasks))


def capacity(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return what each resource of each stage does in a second (processor seconds, bytes of links)."""
    share = min(1.0, cluster.processor.share)
    found = {}
    for stage in range(job.pipeline):
        found[f"processor{stage}"] = share
        found[f"uplink{stage}"] = cluster.between.bandwidth
        found[f"inside{stage}"] = cluster.inside.bandwidth
    return found


def forward_seconds(job: Job, cluster: Cluster, operations: float) -> float:
    """Return the seconds of one microbatch's forward pass that takes `operations` for each token."""
    tokens = job.micro_batch * job.sequence / job.context
    return operations * tokens / cluster.processor.flops


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
    for number, maker in enumerate(stages):
        done = _first_forward(maker, buckets[number], previous)
        previous = maker.pass_on(int(number < job.pipeline - 1), [_at(done, 1 / job.virtual)])
        forwards.append(done)
    middles = []
    for number, maker in enumerate(stages):
        seconds = rest * (1 + backward) * forward_seconds(job, cluster, job.stages[number].operations)
        middle = maker.work("other microbatches", seconds, forwards[number][-1:], "compute")
        neighbours = (number > 0) + (number < job.pipeline - 1)
        beside = forwards[number][-1:] if job.virtual > 1 else [middle]
        middles.append([middle, *maker.pass_on(rest * neighbours * job.virtual, beside)])
    previous = []
    for number in reversed(range(job.pipeline)):
        maker = stages[number]
        ended = _last_backward(maker, buckets[number], backward, [*middles[number], *previous])
        previous = maker.pass_on(int(number > 0), [_at(ended, 1 / job.virtual)])
        if not job.overlap_gradients or job.after_backward:
            for place, bucket in enumerate(buckets[number]):
                maker.start(bucket, ended[-1:], place)
        maker.finish()
    before = timeline.place("all gradients", {}, list(timeline.tasks), latency=norm_latency(cluster))
    for number, maker in enumerate(stages):
        _optimizer(maker, buckets[number], before)
    return stages


def norm_latency(cluster: Cluster) -> float:
    """Return the seconds of the small all-reduce of the gradients' norm over all ranks, by a tree."""
    from math import ceil, log2

    turns = 2 * ceil(log2(cluster.nodes)) if cluster.nodes > 1 else 0
    return cluster.call_latency + turns * cluster.between.latency


def _at(pieces: Sequence[Task], share: float) -> Task:
    """Return the first piece at whose end this share of a pass is done."""
    whole = sum(task.seconds for task in pieces)
    done = 0.0
    for task in pieces:
        done += task.seconds
        if done >= share * whole * (1 - 1e-9):
            return task
    return pieces[-1]


def _pieces(operations: float, virtual: int) -> list[float]:
    return [operations / virtual] * virtual if virtual > 1 else [operations]


def _first_forward(maker: Exchanges, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
    """Place the stage's first forward pass, and the gathers for which it waits."""
    job = maker.job
    overlapped = job.overlap_weights and _gathers(maker)
    places = [0, 0]
    parameters = job.stages[maker.stage].parameters
    numbers = [0, 0]
    due = {
        (bucket.expert, bucket.first): bucket for bucket in buckets
    }  # The forward pass needs a bucket at its first parameter.
    done: list[Task] = []
    operations = 0.0
    before: list[Task] = list(after)
    last_gather: dict[bool, list[Task]] = {False: [], True: []}
    for parameter in parameters:
        place = numbers[parameter.expert]
        numbers[parameter.expert] += 1
        bucket = due.get((parameter.expert, place))
        if bucket is not None and overlapped:
            if operations:
                before = [_forward(maker, operations, before)]
                done += before
                operations = 0.0
            # A gather starts when the bucket before it is waited for, the first one when it is needed.
            asked = last_gather[parameter.expert] or before
            places[parameter.expert] += 1
            arrived = gather(maker, [bucket], asked, places[parameter.expert])
            last_gather[parameter.expert] = arrived
            before = [*before, *arrived]
        operations += parameter.operations
    for piece in _pieces(operations, job.virtual if not done else 1):
        before = [_forward(maker, piece, before)]
        done += before
    return done


def _forward(maker: Exchanges, operations: float, after: Sequence[Task]) -> Task:
    return maker.work("forward", forward_seconds(maker.job, maker.cluster, operations), after, "compute")


def _last_backward(
    maker: Exchanges, buckets: Sequence[Bucket], backward: float, after: Sequence[Task]
) -> list[Task]:
    """Place the stage's last backward pass; with overlap each bucket's exchange starts within it."""
    job = maker.job
    numbers = [
        sum(p.expert == expert for p in job.stages[maker.stage].parameters) for expert in (False, True)
    ]
    completes = {(bucket.expert, bucket.first): place for place, bucket in enumerate(buckets)}
    done: list[Task] = []
    operations = 0.0
    before = list(after)
    for parameter in reversed(job.stages[maker.stage].parameters):
        numbers[parameter.expert] -= 1
        operations += backward * parameter.operations
        place = completes.get((parameter.expert, numbers[parameter.expert]))
        if place is None:
            continue
        for piece in _pieces(operations, job.virtual if not done else 1):
            seconds = forward_seconds(job, maker.cluster, piece)
            before = [maker.work("backward", seconds, before, "compute")]
            done += before
        operations = 0.0
        if job.overlap_gradients and not job.after_backward:
            maker.start(buckets[place], done[-1:], place)
    return done


def _optimizer(maker: Exchanges, buckets: Sequence[Bucket], ready: Task) -> None:
    """Place a stage's optimizer step, with 1-bit Adam's exchange, and the gather if it is not overlapped."""
    processor, job = maker.cluster.processor, maker.job
    before: list[Task] = [ready]
    if maker.method.momentum:
        before = maker.momentum(buckets, before)
    owned = 0.0
    for bucket in buckets:
        ranks = job.group(maker.cluster, bucket.expert).ranks if maker.method.shards_optimizer(job) else 1
        owned += bucket.elements / ranks
    before = [maker.work("optimizer", processor.optimizer.seconds(owned) + processor.step, before, "compute")]
    before = encode(maker, buckets, before)
    if not job.overlap_weights:
        for number, batch in enumerate(_batches(maker, buckets)):
            before = gather(maker, batch, before, number)


def _gathers(maker: Exchanges) -> bool:
    """Whether the ranks gather updated weights."""
    return maker.method.shards_optimizer(maker.job) and not maker.method.free


def encode(maker: Exchanges, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
    """Place what the exact gather does after the optimizer's step: encode messages, and gather lengths."""
    if not (_gathers(maker) and maker.method.exact):
        return list(after)
    processor, before = maker.cluster.processor, list(after)
    for expert in (False, True):
        chosen = [bucket for bucket in buckets if bucket.expert == expert]
        group = maker.job.group(maker.cluster, expert)
        if not chosen or group.ranks == 1:
            continue
        owned = sum(bucket.elements for bucket in chosen) / group.ranks
        whole = owned * (group.ranks - 1)
        seconds = processor.weight_encode.seconds(owned) + processor.weight_sums.seconds(whole)
        coded = maker.work("weights: encode", seconds, before, "compute")
        lengths = traffic.gather(_LENGTHS_BYTES * len(chosen), group, maker.cluster)
        before = [maker.send("weights: lengths", lengths, group, [coded], "network weights ", weights=True)]
    return before


def gather(maker: Exchanges, batch: Sequence[Bucket], after: Sequence[Task], number: int) -> list[Task]:
    """Place one gather of buckets of one group; the returned tasks end when the weights are written."""
    expert = batch[0].expert
    group = maker.job.group(maker.cluster, expert)
    if not _gathers(maker) or group.ranks == 1:
        return list(after)
    elements = sum(bucket.elements for bucket in batch)
    bits = maker.job.bits_of_weights if maker.method.exact else 8.0 * maker.job.weight_bytes
    call = traffic.gather(elements / group.ranks * bits / 8, group, maker.cluster)
    stream = "network experts' weights " if expert else "network weights "
    sent = maker.send(f"weights {number}: all-gather", call, group, after, stream, weights=True)
    if not maker.method.exact:
        return [sent]
    seconds = maker.cluster.processor.weight_decode.seconds(elements * (1 - 1 / group.ranks))
    return [maker.work(f"weights {number}: decode", seconds, [sent], "compute")]


def _batches(maker: Exchanges, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Split buckets whose gathers begin together into the batches that are sent (weights/batch.py)."""
    found: list[list[Bucket]] = []
    for expert in (False, True):
        chosen = [bucket for bucket in buckets if bucket.expert == expert]
        if not maker.method.exact:
            found += [[bucket] for bucket in chosen]
            continue
        room = max((bucket.elements * maker.job.weight_bytes for bucket in chosen), default=0)
        batch: list[Bucket] = []
        for bucket in chosen:
            if batch and sum(b.elements for b in [*batch, bucket]) * maker.job.bits_of_weights / 8 > room:
                found.append(batch)
                batch = []
            batch.append(bucket)
        found += [batch] if batch else []
    return found
