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
from megatron_patch.workflows.plan import step, traffic
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.exchange import IN_FLIGHT, Exchanges, Handle, Sent
from megatron_patch.workflows.plan.job import (
    DDP,
    FSDP2,
    HYBRID,
    MEGATRON,
    OPTIM_GRADS,
    Bucket,
    Group,
    Job,
    cut,
)
from megatron_patch.workflows.plan.methods import FREE, Method, chosen
from megatron_patch.workflows.plan.step import Step
from megatron_patch.workflows.plan.timeline import Task, Timeline

_BF16 = 2
_DDP_BUCKET = 25 * 2**20 / _BF16
_ADAM = 16
"""Bytes per owned parameter: weight, gradient and two moments in fp32."""
_MEGATRON_FSDP = "megatron.use_megatron_fsdp=true megatron.data_parallel_sharding_strategy=optim_grads"


def planned_with(job: Job, strategy: str) -> Job:
    """Return the job of a recipe's model and batch under this strategy.

    Raises:
        UserError: the strategy is not Megatron's DDP, and the recipe has other than data parallelism.
    """
    if strategy == MEGATRON:
        return job
    for size, flag in (
        (job.tensor, "tensor_model_parallel_size"),
        (job.pipeline, "pipeline_model_parallel_size"),
        (job.context, "context_parallel_size"),
        (job.expert, "expert_model_parallel_size"),
    ):
        if size > 1:
            raise UserError(
                f"--strategy {strategy}: is planned with data parallelism alone; add megatron.{flag}=1"
            )
    job = dataclasses.replace(job, strategy=strategy, weight_bytes=_BF16, distributed=strategy != DDP)
    return job if strategy == OPTIM_GRADS else dataclasses.replace(job, gradient_bytes=_BF16)


def methods_of(names: str | None, job: Job) -> list[Method]:
    """Return the methods of `--methods`, with the options that switch them on.

    Raises:
        UserError: a method is not served under the job's strategy.
    """
    strategy = job.strategy
    if strategy == OPTIM_GRADS:
        found = chosen(names or "stock,none_exact,loco4,loco4_exact,loco2_exact", True, True, True)
        for method in found:
            if method.momentum or method.distributed is not None:
                raise UserError(
                    f"--methods: {method.name} needs Megatron's DDP; leave it out with --strategy {strategy}"
                )
        return [dataclasses.replace(method, options=f"{method.options} {_MEGATRON_FSDP}") for method in found]
    # With FSDP2 LoCo's errors, a byte per parameter on every rank, are much beside the sharded state.
    usual = "stock,naive4,loco4" if strategy == FSDP2 else "stock,loco4,loco2"
    found = chosen(names or usual, one_precision=True, several_hops=strategy == FSDP2, gathers=True)
    for method in found:
        if method.momentum or method.exact or method.distributed is not None or method.gradient_bytes:
            raise UserError(
                f"--methods: {method.name} needs Megatron; leave it out with --strategy {strategy}"
            )
        if strategy != FSDP2 and (method.hops != "auto" or method.intra_bits):
            raise UserError(f"--methods: {method.name}: hops can be chosen with --strategy fsdp2 alone")
    return [
        dataclasses.replace(method, options=_options(method)) if method.bits else method for method in found
    ]


def _options(method: Method) -> str:
    given = f"method={method.method!r}, bits={method.bits}"
    given += "" if method.hops == "auto" else f", topology={method.hops!r}"
    given += f", intra_bits={method.intra_bits}" if method.intra_bits else ""
    return f"megatron_patch.attach(model, CompressionConfig({given}))"


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate a step in the middle of training."""
    seconds, made = _step(job, cluster, method)
    free = seconds if method.free else _step(job, cluster, FREE)[0]
    sent = [dataclasses.asdict(one.sent) for one in made]
    total = Sent(**{name: sum(one[name] for one in sent) for name in sent[0]})
    return Step(method, seconds, max(0.0, seconds - free), (total,), tuple(made[-1].timeline.tasks))


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
    # FSDP2 waits for each of gloo's collectives before it continues, so that everything is one stream.
    waits = bool(cluster.processor.transport) and job.strategy != DDP
    maker = Exchanges(job, cluster, method, 0, Timeline(step.capacity(job, cluster)), one_stream=waits)
    whole = job.group(cluster, False)
    units = _units(job, whole)
    shards = _shard_group(job, whole)
    operations = [_operations(job, unit) for unit in units]
    before: list[Task] = []
    # Units come in the order of the backward pass from `cut`, and the forward pass reverses it.
    for place in reversed(range(len(units))):
        if job.strategy == OPTIM_GRADS:
            arrived = step.gather(maker, [units[place]], before[-2:-1], place) if last else []
        else:
            arrived = _gather(maker, units[place], shards, before[-2:-1])
        before.append(_compute(maker, "forward", operations[place], [*before[-1:], *arrived]))
    backward = 3.0 if job.recompute else 2.0
    handles: list[Handle] = []
    arrived = []  # The last unit's weights are still there after the forward pass.
    for place, unit in enumerate(units):
        # The gather precedes the reduction of this unit's gradients, because both use one communicator.
        more = place + 1 < len(units) and job.strategy != OPTIM_GRADS
        following = _gather(maker, units[place + 1], shards, before[-1:]) if more else []
        before.append(_compute(maker, "backward", backward * operations[place], [*before[-1:], *arrived]))
        arrived = following
        if not method.free and (last or job.strategy != DDP):
            handles += _reduce(maker, unit, whole, before[-1:], place, last)
    for handle in handles:
        if not handle.done:
            maker.end(handle)
    if last:
        gradients = list(maker.timeline.tasks)
        done = maker.timeline.place("all gradients", {}, gradients, latency=step.norm_latency(cluster))
        processor = cluster.processor
        owned = sum(unit.elements for unit in units) / shards.ranks
        seconds = processor.optimizer.seconds(owned) + processor.step
        stepped = maker.work("optimizer", seconds, [done], "compute")
        if job.strategy == OPTIM_GRADS:
            step.encode(maker, units, [stepped])
    return maker


def _units(job: Job, whole: Group) -> list[Bucket]:
    parameters = job.stages[0].parameters
    size = _DDP_BUCKET if job.strategy == DDP else sum(p.numel for p in parameters) / (job.layers + 1)
    alike = [dataclasses.replace(parameter, expert=False) for parameter in parameters]
    return cut(alike, size, whole.ranks, expert=False)


def _shard_group(job: Job, whole: Group) -> Group:
    """Return the group over which the weights are sharded."""
    if job.strategy in (FSDP2, OPTIM_GRADS):
        return whole
    return traffic.inside_of(whole) if job.strategy == HYBRID else Group(1, 1, 1)


def _operations(job: Job, unit: Bucket) -> float:
    return sum(p.operations for p in job.stages[0].parameters[unit.first : unit.last + 1])


def _compute(maker: Exchanges, name: str, operations: float, after: Sequence[Task]) -> Task:
    return maker.work(name, step.forward_seconds(maker.job, maker.cluster, operations), after, "compute")


def _gather(maker: Exchanges, unit: Bucket, shards: Group, after: Sequence[Task]) -> list[Task]:
    if shards.ranks == 1 or maker.method.free:
        return []
    call = traffic.gather(_BF16 * unit.elements / shards.ranks, shards, maker.cluster)
    return [maker.send("weights: all-gather", call, shards, after, "network weights ", weights=True)]


def _reduce(
    maker: Exchanges, unit: Bucket, whole: Group, ready: Sequence[Task], place: int, last: bool
) -> list[Handle]:
    """Place the reduction of a unit's gradients after `ready`, the end of its backward pass."""
    name, cluster, strategy = f"unit {place}", maker.cluster, maker.job.strategy
    if strategy in (FSDP2, OPTIM_GRADS):
        if whole.ranks == 1:
            return []
        if maker.method.bits is not None:
            return [maker.start_low(unit, whole, ready, "dense", name, back=False)]
        nbytes = maker.method.bytes_of_gradient(maker.job)
        call = traffic.stock_reduce(unit.elements, nbytes, whole, cluster, fp32_sum=False)
        maker.send(f"{name}: reduce-scatter", call, whole, ready, "network weights ")
        return []
    replicas, elements = whole, unit.elements
    if strategy == HYBRID:
        here = traffic.inside_of(whole)
        replicas, elements = traffic.across(whole), unit.elements // here.ranks
        if here.ranks > 1:
            call = traffic.stock_reduce(unit.elements, _BF16, here, cluster, fp32_sum=False)
            ready = [maker.send(f"{name}: reduce-scatter", call, here, ready, "network weights ")]
    if not last or replicas.ranks == 1:
        return []
    share = Bucket(elements, unit.exact // (unit.elements // elements), unit.first, unit.last)
    if maker.method.bits is not None:
        return [maker.start_low(share, replicas, ready, "dense", name, back=True)]
    for call in traffic.all_reduce(elements, _BF16, replicas, cluster):
        ready = [maker.send(f"{name}: all-reduce", call, replicas, ready, "network dense ")]
    return []


def memory_bytes(job: Job, cluster: Cluster, method: Method) -> float:
    """Return the bytes that a rank needs for state, gathered units, buffers and activations."""
    whole = job.group(cluster, False)
    shards = _shard_group(job, whole)
    units = sorted((unit.elements for unit in _units(job, whole)), reverse=True)
    total = job.activation_bytes + _ADAM * sum(units) / shards.ranks
    if job.strategy == OPTIM_GRADS:  # Weights are whole; the exact gather adds old shards and messages.
        total += sum(units) * (_BF16 + (4 / shards.ranks if method.exact else 0))
    if shards.ranks > 1:  # Two units' weights and gradients are whole at a time.
        total += 2 * _BF16 * sum(units[:2])
    senders = traffic.across(whole) if job.strategy == HYBRID else whole
    if method.bits is None or senders.ranks == 1:
        return total
    hops = method.two_hops(senders)
    part = shards.ranks if job.strategy == HYBRID else senders.local if hops else 1
    payloads = senders.nodes if hops else senders.ranks
    if method.keeps_errors:
        total += traffic.ERROR * sum(units) / part
    coded = (traffic.payload(unit // part, payloads, method.bits) for unit in units[:IN_FLIGHT])
    return total + 2 * payloads * sum(coded)
