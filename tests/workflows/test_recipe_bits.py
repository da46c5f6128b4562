"""Bits that a gradient element takes on the wire in recipes for GPUs, from Megatron's own buckets.

The parameters of a rank's first layers, as the planner knows them, are made on the meta device. The buckets
that Megatron lays them out in are cut for the recipe's data-parallel ranks, and for 48, anywhere.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from worker_pool import WorkerPool
from workflows.plan.test_job import home, job_of

from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout

RECIPES = ("llama_350m", "llama3_70b", "mixtral_8x7b", "qwen3_30b_a3b")
FIRST = 20
"""Parameters of a kind, two layers' at least."""


def bits_of(shapes: list[tuple[int, ...]], ranks: int, bits: int) -> float:
    """Bits an element of the buckets that `ranks` exchange, what pads them and their payloads included."""
    parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    size = max(40_000_000, 1_000_000 * ranks)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    found = DistributedOptimizer._compute_per_buffer_param_layout(parameters, size, ranks, config)
    nbytes = elements = 0
    for bucket, (first, end) in enumerate(found.bucket_indices):
        spans = [
            Span.of(start - first, parameter.shape, exact=parameter.dim() < 2)
            for parameter, (start, _, index) in found.param_index_map.items()
            if index == bucket
        ]
        layout = BlockLayout.of(end - first, ranks, bits, 128, spans=sorted(spans, key=lambda s: s.start))
        nbytes += sum(layout.payload_sizes)
        elements += end - first
    return 8 * nbytes / elements


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("bits", "ranks"), [(4, 48), (2, None)])
def test_a_recipe_takes_hardly_more_than_codes_and_scales(
    name: str, bits: int, ranks: int | None, pool: WorkerPool
) -> None:
    (one,) = pool.run(job_of, name, world_size=1)
    data = ranks or one.group(home(name), False).ranks
    for expert in (False, True) if one.expert > 1 else (False,):
        shapes = [parameter.shape for parameter in one.stages[0].of(expert)][:FIRST]
        group = data // one.expert if expert else data
        assert bits + 0.125 <= bits_of(shapes, group, bits) < bits + 0.14
