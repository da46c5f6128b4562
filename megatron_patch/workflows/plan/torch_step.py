"""Simulates one training step under Megatron-FSDP, or PyTorch's DDP, FSDP2 or hybrid sharding, on one rank.

    optim_grads   Megatron-FSDP with whole weights on every rank: in every microbatch each unit's gradients
                  are reduced, and once a step the weights are gathered
    fsdp2         weights are sharded over all ranks: in every microbatch each unit is gathered for its
                  forward pass and again for its backward pass, and its gradients are reduced
    hybrid        the same inside each node; in the last microbatch the shards are all-reduced between nodes
    ddp           weights are whole on every rank: in the last microbatch buckets of 25 MiB are all-reduced

A unit is the part of the model that is sharded at a time, here about a layer. A unit is gathered while the
one before it computes, as FSDP2 prefetches; weights and torch's uncompressed gradients are sent in bf16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import step
from megatron_patch.workflows.plan.cluster import Cluster, Group
from megatron_patch.workflows.plan.job import DDP, FSDP2, HYBRID, MEGATRON, OPTIM_GRADS, Bucket, Job, cut
from megatron_patch.workflows.plan.methods import FREE, Method, chosen
from megatron_patch.workflows.plan.step import Exchanges, Handle, Sent, Step, Task, Timeline

_BF16 = 2
_DDP_BUCKET = 25 * 2**20 / _BF16
_MEGATRON_FSDP = "megatron.use_megatron_fsdp=true megatron.data_parallel_sharding_strategy=optim_grads"


def planned_with(job: Job, strategy: str) -> Job:
    """Return the job of a recipe's model and batch under this strategy.

    Raises:
        UserError: the strategy is not Megatron's DDP, and the recipe has other than data parallelism.
    """
    if strategy == MEGATRON:
        return job
    for flag in ("tensor_model", "pipeline_model", "context", "expert_model"):
        if getattr(job, flag.removesuffix("_model")) > 1:
            raise UserError(
                f"--strategy {strategy}: is planned with data parallelism alone; add "
                f"megatron.{flag}_parallel_size=1"
            )
    job = dataclasses.replace(job, strategy=strategy, weight_bytes=_BF16, distributed=strategy != DDP)
    return job if strategy == OPTIM_GRADS else dataclasses.replace(job, gradient_bytes=_BF16)


def methods_of(names: str | None, job: Job) -> list[Method]:
    """Return the methods of `--methods`, with the options that switch them on.

    Raises:
        UserError: a method is not served under the job's strategy.
    """
    strategy = job.strategy
    # With FSDP2 LoCo's errors, a byte per parameter on every rank, are much beside the sharded state.
    usual = {OPTIM_GRADS: "stock,none_exact,loco4,loco4_exact,loco2_exact", FSDP2: "stock,naive4,loco4"}
    several_hops = strategy in (OPTIM_GRADS, FSDP2)
    methods = chosen(names or usual.get(strategy, "stock,loco4,loco2"), True, several_hops, True)
    for method in methods:
        of_ddp = method.momentum or method.distributed is not None
        if of_ddp or (strategy != OPTIM_GRADS and (method.exact or method.gradient_bytes)):
            needed = "Megatron's DDP" if strategy == OPTIM_GRADS else "Megatron"
            raise UserError(
                f"--methods: {method.name} needs {needed}; leave it out with --strategy {strategy}"
            )
        if not several_hops and method.hops != "auto":
            raise UserError(f"--methods: {method.name}: hops can be chosen with --strategy fsdp2 alone")
    return [dataclasses.replace(method, options=_options(method, strategy)) for method in methods]


def _options(method: Method, strategy: str) -> str:
    if strategy == OPTIM_GRADS:
        return f"{method.options} {_MEGATRON_FSDP}"
    if method.bits is None:
        return method.options
    given = f"method={method.method!r}, bits={method.bits}"
    given += "" if method.hops == "auto" else f", topology={method.hops!r}"
    return f"megatron_patch.attach(model, CompressionConfig({given}))"


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate a step in the middle of training."""
    seconds, microbatches = _step(job, cluster, method)
    free = seconds if method.free else _step(job, cluster, FREE)[0]
    sent = [dataclasses.asdict(microbatch.sent) for microbatch in microbatches]
    total = Sent(**{name: sum(of_one[name] for of_one in sent) for name in sent[0]})
    return Step(seconds, max(0.0, seconds - free), (total,), tuple(microbatches[-1].timeline.tasks))


def _step(job: Job, cluster: Cluster, method: Method) -> tuple[float, list[Exchanges]]:
    """Simulate the last microbatch, and one of the others, which are alike, to be counted for all of them."""
    last = _microbatch(job, cluster, method, last=True)
    seconds = last.timeline.end
    rest = job.microbatches(cluster.world) - 1
    if not rest:
        return seconds, [last]
    other = _microbatch(job, cluster, method, last=False)
    return seconds + rest * other.timeline.end, [*[other] * rest, last]


def _microbatch(job: Job, cluster: Cluster, method: Method, *, last: bool) -> Exchanges:
    # FSDP2 waits for a collective that the rank's own thread runs, as gloo's, before it continues.
    waits = cluster.one_stream and job.strategy != DDP
    rank = Exchanges(job, cluster, method, 0, Timeline(step.capacity(job, cluster)), one_stream=waits)
    whole = job.group(cluster, False)
    units = _units(job, whole)
    shards = _shard_group(job, whole)
    operations = [_operations(job, unit) for unit in units]
    before: list[Task] = []
    # Units come in the order of the backward pass from `cut`, and the forward pass reverses it.
    for place in reversed(range(len(units))):
        if job.strategy == OPTIM_GRADS:
            arrived = rank.gather([units[place]], before[-2:-1]) if last else []
        else:
            arrived = _gather(rank, units[place], shards, before[-2:-1])
        seconds = step.forward_seconds(job, cluster, operations[place])
        before.append(rank.work("forward", seconds, [*before[-1:], *arrived]))
    backward = 3.0 if job.recompute else 2.0
    handles: list[Handle] = []
    arrived = []  # The last unit's weights are still there after the forward pass.
    for place, unit in enumerate(units):
        # The gather precedes the reduction of this unit's gradients, because both use one communicator.
        more = place + 1 < len(units) and job.strategy != OPTIM_GRADS
        following = _gather(rank, units[place + 1], shards, before[-1:]) if more else []
        seconds = step.forward_seconds(job, cluster, backward * operations[place])
        before.append(rank.work("backward", seconds, [*before[-1:], *arrived]))
        arrived = following
        if not method.free and (last or job.strategy != DDP):
            handles += _reduce(rank, unit, whole, before[-1:], place, last)
    for handle in handles:
        rank.end(handle)
    if last:
        ready = rank.timeline.place(
            "all gradients", {}, list(rank.timeline.tasks), latency=step.norm_latency(cluster)
        )
        owned = sum(unit.elements for unit in units) / shards.ranks
        seconds = cluster.processor.optimizer * owned + cluster.processor.step
        stepped = rank.work("optimizer", seconds, [ready])
        if job.strategy == OPTIM_GRADS:
            rank.encode(units, [stepped])
    return rank


def _units(job: Job, whole: Group) -> list[Bucket]:
    parameters = job.stages[0].parameters
    size = _DDP_BUCKET if job.strategy == DDP else sum(p.numel for p in parameters) / (job.layers + 1)
    alike = [dataclasses.replace(parameter, expert=False) for parameter in parameters]
    return cut(alike, size, whole.ranks, expert=False)


def _shard_group(job: Job, whole: Group) -> Group:
    """Return the group over which the weights are sharded."""
    if job.strategy in (FSDP2, OPTIM_GRADS):
        return whole
    return whole.inside if job.strategy == HYBRID else Group(1, 1, 1)


def _operations(job: Job, unit: Bucket) -> float:
    return sum(p.operations for p in job.stages[0].parameters[unit.first : unit.last + 1])


def _gather(rank: Exchanges, unit: Bucket, shards: Group, after: Sequence[Task]) -> list[Task]:
    if shards.ranks == 1 or rank.method.free:
        return []
    call = rank.cluster.gather(_BF16 * unit.elements / shards.ranks, shards)
    return [rank.send("weights", call, after, "network weights ", weights=True)]


def _reduce(
    rank: Exchanges, unit: Bucket, whole: Group, ready: Sequence[Task], place: int, last: bool
) -> list[Handle]:
    """Place the reduction of a unit's gradients after `ready`, the end of its backward pass."""
    name, cluster, job, low = f"unit {place}", rank.cluster, rank.job, rank.method.bits is not None
    if job.strategy in (FSDP2, OPTIM_GRADS):
        if whole.ranks > 1 and low:
            return [rank.start_low(unit, whole, ready, "dense", name, back=False)]
        if whole.ranks > 1:
            nbytes = rank.method.bytes_of_gradient(job)
            call = cluster.stock_reduce(unit.elements, nbytes, whole, fp32_sum=False)
            rank.send(name, call, ready, "network weights ")
        return []
    replicas, elements = whole, unit.elements
    if job.strategy == HYBRID:
        replicas, elements = whole.across, unit.elements // whole.local
        if whole.local > 1:
            call = cluster.stock_reduce(unit.elements, _BF16, whole.inside, fp32_sum=False)
            ready = [rank.send(name, call, ready, "network weights ")]
    if not last or replicas.ranks == 1:
        return []
    if low:
        share = Bucket(elements, unit.exact // (unit.elements // elements), unit.first, unit.last)
        return [rank.start_low(share, replicas, ready, "dense", name, back=True)]
    for call in cluster.all_reduce(elements, _BF16, replicas):
        ready = [rank.send(name, call, ready, "network dense ")]
    return []


def added_bytes(job: Job, cluster: Cluster, method: Method) -> float:
    """Return how many bytes of memory a method needs more than stock on a rank."""
    whole = job.group(cluster, False)
    units = [unit.elements for unit in _units(job, whole)]
    # As with Megatron's DDP.
    exact = 4 * sum(units) / whole.ranks if method.exact and whole.ranks > 1 else 0.0
    if job.strategy == HYBRID:
        units, whole = [unit // whole.local for unit in units], whole.across
    nbytes, back = method.bytes_of_gradient(job), job.strategy in (HYBRID, DDP)
    return exact + step.held(method, whole, sum(units), units, nbytes, back=back)
