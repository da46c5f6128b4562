"""What the weight gathers of a run sent, as numbers for its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.megatron.attach import attachment_of
from megatron_patch.megatron.seams import traffic
from megatron_patch.megatron.seams.weights import ChunkWeights


def bucket_groups(model: Sequence[Any]) -> list[Any]:
    """Those of a model's chunks, dense before expert by chunk; FSDP has none."""
    return [
        group
        for chunk in model
        for kind in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(chunk, kind, [])
    ]


def gathers_of(model: Sequence[Any]) -> list[ChunkWeights]:
    """The weight gathers of the attached ones of a model's chunks."""
    return [found.weights for chunk in model if (found := attachment_of(chunk)) is not None]


def sent(model: Sequence[Any]) -> Traffic:
    """What this rank sent since the last step but one; where nothing is attached, Megatron's own gather."""
    if chunks := gathers_of(model):
        return sum((bucket.traffic for chunk in chunks for bucket in chunk.report), start=Traffic())
    return sum((traffic.stock_weights(group) for group in bucket_groups(model)), start=Traffic())


def coded(model: Sequence[Any]) -> list[float]:
    """This rank's coded weights in the last step, how many did not change, and bytes of its messages."""
    totals = [0.0, 0.0, 0.0]
    for bucket in (bucket for chunk in gathers_of(model) for bucket in chunk.report):
        if bucket.unchanged is not None:
            totals[0] += bucket.weights
            totals[1] += int(bucket.unchanged)
            totals[2] += bucket.message_bytes
    return totals


def by_bucket(model: Sequence[Any]) -> dict[str, float]:
    """Bits a weight of every bucket on this rank."""
    chunks = gathers_of(model)
    return {
        (f"chunk {number} " if len(chunks) > 1 else "") + bucket.name: bucket.traffic.bits_per_element
        for number, chunk in enumerate(chunks)
        for bucket in chunk.report
        if bucket.traffic.elements
    }


def raw_gathers(model: Sequence[Any]) -> dict[str, int]:
    """Coded bucket groups that were gathered in full since the start, by reason (seams/weights.py)."""
    return dict(sum((chunk.raw_gathers for chunk in gathers_of(model)), start=Counter()))


def mean(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of a run's records: the code's size changes with the learning rate."""
    total = Traffic()
    for record in records:
        nbytes, bits = record["weight_wire_bytes"], record["weight_wire_bits_per_element"]
        total.add(Traffic(nbytes, 8 * nbytes / bits if bits else 0.0))
    return {"bytes_per_step": total.nbytes / len(records), "bits_per_element": total.bits_per_element}
