"""Simulates outer steps (megatron/outer_steps.py) of a job whose optimizer instances are the cluster's nodes.

A node trains by itself: its step is that of a cluster of one node with the node's part of the batch. After H
steps the owners of a shard all-reduce it between nodes, bucket after bucket, and the weights are gathered
again inside the node. With a delay of D steps buckets are exchanged in turns. A turn takes what D steps leave
of the links' time, and the next step gathers the weights. A step's time and traffic are means over the H
steps.
"""

from __future__ import annotations

import dataclasses
import math

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import exchange, step, traffic
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.exchange import Exchanges, Sent
from megatron_patch.workflows.plan.job import MEGATRON, Bucket, Job
from megatron_patch.workflows.plan.methods import Method
from megatron_patch.workflows.plan.step import Step
from megatron_patch.workflows.plan.timeline import Task, Timeline

_FP32 = 4
_ANCHOR = 4
_UNDER_WAY = 8  # The weights before the exchange and their difference to the anchor, in fp32.


def check(job: Job, cluster: Cluster, method: Method) -> None:
    """Raise a UserError if the nodes of a cluster cannot be a job's optimizer instances."""
    node = max(job.tensor * job.context, job.expert * job.expert_tensor)
    reasons = {
        "a cluster of several nodes": cluster.nodes == 1,
        "Megatron's DDP with its distributed optimizer": job.strategy != MEGATRON or not job.distributed,
        "a single pipeline stage, whose ranks are replicas": job.pipeline > 1,
        "a replica of the model inside each node": bool(cluster.per_node % node),
    }
    for needed, missing in reasons.items():
        if missing:
            raise UserError(f"--methods: {method.name} needs {needed}; leave it out here")


def simulate(job: Job, cluster: Cluster, method: Method) -> Step:
    """Simulate the mean of the steps between two outer steps, one of which makes an outer step."""
    alone = step.simulate(*_node(job, cluster, method))
    maker = _outer_step(job, cluster, method)
    seconds = maker.timeline.end
    if method.outer_delay:
        at_once = _outer_step(job, cluster.with_inter(math.inf), method).timeline.end
        hidden = _turns(job, cluster, method) * method.outer_delay * alone.seconds
        seconds = at_once + max(0.0, seconds - at_once - hidden)
    share = seconds / method.outer_interval
    inside, outer = dataclasses.asdict(alone.sent[0]), dataclasses.asdict(maker.sent)
    sent = Sent(**{name: inside[name] + outer[name] / method.outer_interval for name in inside})
    return Step(method, alone.seconds + share, alone.exposed + share, (sent,), alone.tasks)


def memory_bytes(job: Job, cluster: Cluster, method: Method) -> float:
    """Return the bytes that a rank needs: as in its node alone, and for the outer steps."""
    of_owned = _ANCHOR + (traffic.ERROR if method.keeps_errors else 0.0)
    of_owned += _UNDER_WAY / _turns(job, cluster, method) if method.outer_delay else 0.0
    part, node, inside = _node(job, cluster, method)
    owned = sum(shard.elements for shard in _owned(job, node))
    return exchange.bytes_of(part, node, inside) + of_owned * owned


def _node(job: Job, cluster: Cluster, method: Method) -> tuple[Job, Cluster, Method]:
    part = dataclasses.replace(job, global_batch=job.global_batch // cluster.nodes)
    return part, dataclasses.replace(cluster, nodes=1), dataclasses.replace(method, outer_interval=1)


def _buckets(job: Job, node: Cluster) -> list[Bucket]:
    return [bucket for expert in (False, True) for bucket in job.buckets(0, node, expert)]


def _owned(job: Job, node: Cluster) -> list[Bucket]:
    """Return this rank's shards of all buckets."""
    found = []
    for bucket in _buckets(job, node):
        ranks = job.group(node, bucket.expert).ranks
        found.append(
            dataclasses.replace(bucket, elements=bucket.elements // ranks, exact=bucket.exact // ranks)
        )
    return found


def _turns(job: Job, cluster: Cluster, method: Method) -> int:
    """Return in how many turns buckets of about the same size are exchanged, which has a delay."""
    return min(
        method.outer_interval // method.outer_delay, len(_buckets(job, _node(job, cluster, method)[1]))
    )


def _outer_step(job: Job, cluster: Cluster, method: Method) -> Exchanges:
    maker = Exchanges(job, cluster, method, 0, Timeline(step.capacity(job, cluster)), one_stream=True)
    alone, node, _ = _node(job, cluster, method)
    before: list[Task] = []
    for place, shard in enumerate(_owned(job, node)):
        owners, name = traffic.across(job.group(cluster, shard.expert)), f"outer step of bucket {place}"
        if method.bits is not None:
            maker.end(maker.start_low(shard, owners, before, "dense", name, back=True))
        else:
            for call in traffic.all_reduce(shard.elements, _FP32, owners, cluster):
                before = [maker.send(f"{name}: {call.kind}", call, owners, before, "network dense ")]
        # It reads and writes about as much as an optimizer's step of these elements.
        seconds = cluster.processor.optimizer.seconds(shard.elements)
        before = [maker.work(f"{name}: new anchor", seconds, before, "compute")]
    if method.outer_delay:
        return maker
    gathering = Exchanges(alone, node, method, 0, maker.timeline, one_stream=True, sent=maker.sent)
    before = step.encode(gathering, _buckets(job, node), before)
    for number, bucket in enumerate(_buckets(job, node)):
        before = step.gather(gathering, [bucket], before, number)
    return maker
