"""Jobs of recipes: parameters, buckets and bytes as Megatron and this package's layout have them."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from worker_pool import WorkerPool
from workflows.run.test_recipes import PUBLISHED

from megatron_patch.errors import UserError
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.workflows.plan import cluster, command, constants, methods, step
from megatron_patch.workflows.plan.cluster import Group
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import shipped

Make = Callable[..., Any]


def job_of(name: str, overrides: tuple[str, ...] = ()) -> Job | str:
    """In a worker: the job of configs/models/NAME.yaml, or what was refused."""
    run = configuration.load(shipped(f"configs/models/{name}.yaml"), overrides)
    with redirect_stdout(io.StringIO()):
        try:
            return command.job_of(run, name)
        except UserError as error:
            return str(error)


@pytest.fixture(scope="module")
def job(pool: WorkerPool) -> Make:
    """job(name, *overrides): a recipe's job, or what was refused."""
    return functools.cache(lambda name, *overrides: pool.run(job_of, name, overrides, world_size=1)[0])


def home(name: str) -> cluster.Cluster:
    launch = configuration.load(shipped(f"configs/models/{name}.yaml")).launch
    return cluster.of_gpus(constants.find("H100"), launch.nnodes, launch.nproc_per_node)


WHOLE = [
    *("launch.device=cpu", "launch.nnodes=1", "launch.nproc_per_node=1"),
    *(f"megatron.{way}_model_parallel_size=1" for way in ("tensor", "pipeline", "expert")),
    *("megatron.sequence_parallel=false", "megatron.overlap_param_gather=false"),
    *("megatron.moe_grouped_gemm=false", "megatron.moe_permute_fusion=false"),
    *("megatron.cross_entropy_loss_fusion=false", "megatron.transformer_impl=local"),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones_and_the_padding(name: str, job: Make) -> None:
    one = job(name, *WHOLE)
    run = configuration.load(shipped(f"configs/models/{name}.yaml")).megatron
    rows = -(-run["vocab_size"] // 128) * 128 - run["vocab_size"]
    assert sum(p.numel for p in one.stages[0].parameters) == PUBLISHED[name] + 2 * rows * run["hidden_size"]


@pytest.mark.parametrize("name", ["llama2_70b", "qwen3_30b_a3b"])
def test_operations_are_six_for_each_weight_that_a_token_meets(name: str, job: Make) -> None:
    """Counted apart: 2 a weight forward, without the embedding, and attention's halved scores."""
    one, run = job(name), configuration.load(shipped(f"configs/models/{name}.yaml")).megatron
    met = 0.0
    for stage in one.stages:
        for p in stage.parameters:
            if p.expert:
                met += p.numel * run["moe_router_topk"] / (run["num_experts"] / one.expert) / one.tensor
            elif len(p.shape) == 2:
                met += p.numel
    rows = -(-run["vocab_size"] // (128 * one.tensor)) * 128
    met -= rows * run["hidden_size"]
    width = run.get("kv_channels") or run["hidden_size"] // run["num_attention_heads"]
    scores = 2 * run["seq_length"] * run["num_attention_heads"] * width * run["num_layers"] / one.tensor
    assert sum(stage.operations for stage in one.stages) == pytest.approx(2 * met + scores, rel=1e-9)


def test_stages_send_the_hidden_states_of_a_microbatch(job: Make) -> None:
    """In bf16, cut along the sequence among tensor-parallel ranks."""
    name = "llama2_70b"
    one, run = job(name), configuration.load(shipped(f"configs/models/{name}.yaml")).megatron
    assert run["sequence_parallel"]
    tokens = run["seq_length"] * run["micro_batch_size"] / one.tensor
    assert one.passed_bytes == 2 * tokens * run["hidden_size"]
    assert one.passes_between_nodes(home(name))


@pytest.mark.parametrize("name", ["llama2_7b", "mixtral_8x7b"])
def test_buckets_are_those_that_megatron_cuts(name: str, job: Make) -> None:
    one, on = job(name), home(name)
    group = one.group(on, False)
    size = max(40_000_000, 1_000_000 * group.ranks)
    dense = [p for p in one.stages[0].parameters if not p.expert]
    parameters = [torch.nn.Parameter(torch.empty(p.shape, device="meta")) for p in dense]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    found = DistributedOptimizer._compute_per_buffer_param_layout(parameters, size, group.ranks, config)
    assert all(len(one.buckets(stage, on, False)) == 1 for stage in range(1, one.pipeline))
    ours = one.buckets(0, on, False)
    assert [bucket.elements for bucket in ours] == [end - first for first, end in found.bucket_indices]
    held = [found.param_index_map[parameter][2] for parameter in parameters]
    for number, bucket in enumerate(ours):
        assert [place for place, its in enumerate(held) if its == number] == [
            *range(bucket.first, bucket.last + 1)
        ]


@pytest.mark.parametrize("bits", [4, 2])
def test_payloads_are_within_a_hundredth_of_the_layout_that_knows_rows(bits: int) -> None:
    """The planner counts blocks from each shard's beginning; the exchange from each row's."""
    hidden, ranks = 1024, 16
    shapes = [(3 * hidden, hidden), (hidden,), (hidden, hidden), (2736, hidden)]
    spans, start = [], 0
    for shape in shapes:
        spans.append(Span.of(start, shape, exact=len(shape) == 1))
        start += math.prod(shape)
    elements = -(-start // (128 * ranks)) * 128 * ranks
    real = sum(BlockLayout.of(elements, ranks, bits, 128, spans=spans).payload_sizes)
    ours = ranks * step.payload(elements, ranks, bits, exact=hidden)
    assert ours == pytest.approx(real, rel=0.01)


def test_groups_lie_on_nodes(job: Make) -> None:
    for name, dense in (
        ("llama2_13b", Group(16, 4, 4, 2.0)),
        ("llama2_70b", Group(4, 4, 1, 8.0)),
        ("mixtral_8x7b", Group(16, 2, 8, 1.0)),
    ):
        assert job(name).group(home(name), False) == dense
    assert job(name).group(home(name), True) == Group(2, 2, 1, 8.0)


@pytest.mark.parametrize(
    "name",
    [
        *("llama_350m", "llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b"),
        *("mixtral_8x7b", "qwen3_30b_a3b"),
    ],
)
def test_memory_added_is_the_recipes_header_without_stock(name: str, job: Make) -> None:
    header = shipped(f"configs/models/{name}.yaml").read_text(encoding="utf-8")
    line = next(line for line in header.splitlines() if line.startswith("# Memory per GPU:"))
    state, buffers, *_ = map(float, re.findall(r"([\d.]+) GB", line))
    one, on = job(name), home(name)
    stock = max(
        sum(
            sum(parameter.numel for parameter in stage.of(expert)) * (6 + 12 / one.group(on, expert).ranks)
            for expert in (False, True)
        )
        for stage in one.stages
    )
    found = step.added_bytes(one, on, methods.parse("loco4_exact"))
    assert found / 1e9 == pytest.approx(state + buffers - stock / 1e9, abs=0.15)


def test_learning_rate_sets_the_weights_bits(job: Make) -> None:
    slow, fast = job("llama2_7b", "megatron.lr=1e-4", "megatron.min_lr=1e-5"), job("llama2_7b")
    assert fast.bits_of_weights == pytest.approx(2.07, abs=0.01)
    assert 1 < slow.bits_of_weights < fast.bits_of_weights


def test_what_is_not_supported_is_refused(job: Make) -> None:
    two = "megatron.num_distributed_optimizer_instances=2"
    said = job("llama2_7b", two)
    assert said.startswith("megatron.num_distributed_optimizer_instances: the plan supports a single")
    said = job("llama2_7b", "compression.outer_interval=30", two)
    assert said == "compression.outer_interval: the plan does not know outer steps; plan with 1"
