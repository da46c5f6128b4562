"""Bits that a gradient element takes on the wire in every recipe for GPUs, from Megatron's own buckets.

A rank's parameters, of two layers between the embeddings and the output, are made on the meta device. The
buckets that Megatron lays them out in are cut for the recipe's data-parallel ranks, and for 48, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.workflows.run.configuration import load, shipped

RECIPES = (
    "llama_350m",
    "llama2_7b",
    "llama2_13b",
    "llama2_70b",
    "llama3_8b",
    "llama3_70b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
)
LAYERS = 2


def shapes_of(flags: dict[str, Any]) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """(whether an expert's, shape) of every parameter of a rank, in Megatron's order."""
    hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
    tensor = flags.get("tensor_model_parallel_size", 1)
    width = flags.get("kv_channels") or hidden // heads
    groups = flags["num_query_groups"] if flags.get("group_query_attention") else heads
    vocabulary = -(-flags["vocab_size"] // (128 * tensor)) * 128
    yield False, (vocabulary, hidden)
    for _ in range(LAYERS):
        yield False, (hidden, heads * width // tensor)
        yield False, (hidden,)
        yield False, ((heads + 2 * groups) * width // tensor, hidden)
        if flags.get("qk_layernorm"):
            yield from [(False, (width,))] * 2
        yield False, (hidden,)
        experts, expert = flags.get("num_experts") or 0, flags.get("moe_ffn_hidden_size")
        if experts:
            yield False, (experts, hidden)
            of_rank = experts // flags.get("expert_model_parallel_size", 1)
            expert = expert or flags["ffn_hidden_size"]
            yield from [(True, (2 * expert, hidden))] * of_rank
            yield from [(True, (hidden, expert))] * of_rank
        else:
            yield False, (2 * flags["ffn_hidden_size"] // tensor, hidden)
            yield False, (hidden, flags["ffn_hidden_size"] // tensor)
    yield False, (hidden,)
    yield False, (vocabulary, hidden)


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
@pytest.mark.parametrize(("bits", "ranks"), [(4, None), (4, 48), (2, None)])
def test_a_recipe_takes_hardly_more_than_codes_and_scales(name: str, bits: int, ranks: int | None) -> None:
    configured = load(shipped(f"configs/models/{name}.yaml"), ["launch.device=cpu"])
    flags, launch = configured.megatron, configured.launch
    model = flags.get("tensor_model_parallel_size", 1) * flags.get("pipeline_model_parallel_size", 1)
    data = ranks or launch.nnodes * 8 // model
    shapes = list(shapes_of(flags))
    dense = bits_of([shape for expert, shape in shapes if not expert], data, bits)
    assert bits + 0.125 <= dense < bits + 0.14
    experts = [shape for expert, shape in shapes if expert]
    if experts:
        group = data // flags["expert_model_parallel_size"]
        assert bits + 0.125 <= bits_of(experts, group, bits) < bits + 0.14
