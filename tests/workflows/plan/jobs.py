"""A small job and cluster for the plan's tests, without Megatron."""

from __future__ import annotations

from megatron_patch.workflows.plan.cluster import Cluster, Link, Processor
from megatron_patch.workflows.plan.job import Job, Parameter, PipelineStage

HIDDEN = 256


def job(batch: int, pipeline: int = 1, experts: bool = False, overlap: bool = True, layers: int = 4) -> Job:
    """`layers` alike in each stage; 1 sequence of 64 tokens a microbatch, buckets of 150,000 elements."""
    layer = [
        Parameter((HIDDEN,)),
        Parameter((3 * HIDDEN, HIDDEN), 6.0 * HIDDEN**2),
        Parameter((HIDDEN, HIDDEN), 2.0 * HIDDEN**2),
    ]
    if experts:
        layer += [Parameter((HIDDEN, HIDDEN), 2.0 * HIDDEN**2, expert=True)] * 2
    return Job(
        name="small",
        stages=(PipelineStage(tuple(layer * layers)),) * pipeline,
        tensor=1,
        pipeline=pipeline,
        context=1,
        expert=2 if experts else 1,
        expert_tensor=1,
        virtual=1,
        micro_batch=1,
        global_batch=batch,
        sequence=64,
        gradient_bytes=4,
        weight_bytes=2,
        overlap_gradients=overlap,
        overlap_weights=overlap,
        distributed=True,
        fp32_accumulation=False,
        bucket_size=150_000,
        exact_ratio=0.015,
    )


def cluster(nodes: int, per_node: int = 8, bandwidth: float = 1e9, latency: float = 1e-6) -> Cluster:
    """Ranks of 1e11 operations a second."""
    processor = Processor(
        flops=1e11,
        compress={0: 1e-9},
        decompress=1e-10,
        weight_encode=1e-9,
        weight_decode=1e-9,
        optimizer=1e-9,
        momentum=1e-9,
    )
    return Cluster(nodes, per_node, Link(bandwidth, latency), Link(1e10, latency / 3), processor, latency)
