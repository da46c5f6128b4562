"""Metrics of what happens to weights: gathers' bytes, coded weights, gathers in full, and outer steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.megatron.attach import attachment_of, outer_steps_of
from megatron_patch.megatron.seams import traffic
from megatron_patch.megatron.seams.weights import ChunkWeights


def bucket_groups(model: Sequence[Any]) -> list[Any]:
    """Return the bucket groups of a model's chunks, each chunk's dense ones first; FSDP has none."""
    return [
        group
        for chunk in model
        for kind in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(chunk, kind, [])
    ]


def gathers_of(model: Sequence[Any]) -> list[ChunkWeights]:
    """Return the weight gathers of those of a model's chunks that are attached."""
    return [attachment.weights for chunk in model if (attachment := attachment_of(chunk)) is not None]


def sent(model: Sequence[Any]) -> Traffic:
    """Return this rank's traffic of the last step's weight gathers; Megatron's own if nothing is attached."""
    if chunks := gathers_of(model):
        return sum((bucket.traffic for chunk in chunks for bucket in chunk.report), start=Traffic())
    return sum((traffic.stock_weights(group) for group in bucket_groups(model)), start=Traffic())


def coded(model: Sequence[Any]) -> list[float]:
    """Return this rank's number of coded weights in the last step, how many were unchanged, and the bytes."""
    totals = [0.0, 0.0, 0.0]
    for bucket in (bucket for chunk in gathers_of(model) for bucket in chunk.report):
        if bucket.unchanged is not None:
            totals[0] += bucket.weights
            totals[1] += int(bucket.unchanged)
            totals[2] += bucket.message_bytes
    return totals


def outer_sums(model: Sequence[Any]) -> list[float]:
    """Return the squared norms of d_k and D on this rank, of the last outer step (outer_steps.py), and the
    bytes that this rank sends to other instances, as a mean over all steps."""
    of_chunks = outer_steps_of(model)
    sent = sum(outer.traffic().nbytes / outer.config.outer_interval for outer in of_chunks)
    squares = sum((outer.squares.cpu() for outer in of_chunks), start=torch.zeros(2, dtype=torch.float64))
    return [*squares.tolist(), sent]


def outer_traffic(model: Sequence[Any]) -> Traffic:
    """Return what must be added to a step's traffic to spread this rank's outer steps over all steps."""
    total = Traffic()
    for outer in outer_steps_of(model):
        total.add(outer.traffic() * (1 / outer.config.outer_interval))
        total.add(outer.sent * -1.0)  # The step's own traffic has all that it has sent.
    return total


def outer(model: Sequence[Any], moved: float, mean: float, sent: float) -> dict[str, float]:
    """Return an outer step's metrics from the sums over all ranks of `outer_sums`, the mean for `sent`.

    `outer_norm` is the norm of D, and `outer_distance` how far instances are from their mean, by root mean
    square; a parameter that tensor-parallel ranks do not split counts on each of them.
    """
    of_chunks = outer_steps_of(model)
    if not of_chunks:
        return {}
    instances = of_chunks[0].instances
    apart = max(moved - mean, 0.0)
    return {
        "outer_norm": math.sqrt(mean / instances),
        "outer_distance": math.sqrt(apart / instances),
        "outer_wire_bytes": sent,
    }


def by_bucket(model: Sequence[Any]) -> dict[str, float]:
    """Return the bits per weight that each bucket's gather took on this rank, by the bucket's name."""
    chunks = gathers_of(model)
    return {
        (f"chunk {number} " if len(chunks) > 1 else "") + bucket.name: bucket.traffic.bits_per_element
        for number, chunk in enumerate(chunks)
        for bucket in chunk.report
        if bucket.traffic.elements
    }


def raw_gathers(model: Sequence[Any]) -> dict[str, int]:
    """Count the gathers in full of coded bucket groups since the start, by reason (traffic.RAW_REASONS)."""
    return dict(sum((chunk.raw_gathers for chunk in gathers_of(model)), start=Counter()))


def mean(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Average the weight traffic over a run's records, because its size changes with the learning rate."""
    total = Traffic()
    for record in records:
        nbytes, bits = record["weight_wire_bytes"], record["weight_wire_bits_per_element"]
        total.add(Traffic(nbytes, 8 * nbytes / bits if bits else 0.0))
    return {"bytes_per_step": total.nbytes / len(records), "bits_per_element": total.bits_per_element}
