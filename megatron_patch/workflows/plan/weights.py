"""The tasks of the parameter all-gather: Megatron's own, or the exact one from the changes of a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_patch.workflows.plan import traffic
from megatron_patch.workflows.plan.exchange import Exchanges
from megatron_patch.workflows.plan.fluid import Task
from megatron_patch.workflows.plan.job import Bucket

_LENGTHS_BYTES = 24


def gathers(maker: Exchanges) -> bool:
    """Whether a stage's updated weights travel."""
    return maker.distributed and not maker.method.free


def code(maker: Exchanges, buckets: Sequence[Bucket], after: Sequence[Task]) -> list[Task]:
    """What the exact gather does once the optimizer has stepped: messages, and all ranks' lengths."""
    if not (gathers(maker) and maker.method.exact):
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
    """The gather of buckets of one group, which travel in one piece; ends when the weights are there."""
    expert = batch[0].expert
    group = maker.job.group(maker.cluster, expert)
    if not gathers(maker) or group.ranks == 1:
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


def batches(maker: Exchanges, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """The pieces in which gathers that begin together travel (weights/batch.py)."""
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
