"""Every model recipe: the model is the published one, and batch, parallel sizes and GPUs fit together."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from worker_pool import WorkerPool
from workflows.run import recipe_facts, stage_memory

from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import shipped

RECIPES = sorted(shipped("configs/models").glob("*.yaml"))
PUBLISHED = {
    "llama_350m": 367_969_280,  # GaLore's llama_350m
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}
CPU = {"llama_tiny", "llama_tiny_bf16", "llama_1m", "llama_3m", "llama_10m", "moe_tiny"}
ERROR_BYTES = 1 + 2 / 128
"""Bytes for an element of the 8-bit error state with a bf16 scale for each block of 128."""
TABLE_BYTES = 3 * 4 / 128
"""Bytes for an element in the table that says where each block of 128 is."""
NCCL_BYTES = 3.3e9
"""Bytes of a group's communicator with all-to-alls, as docs/clusters.md has it."""
PAYLOAD_BYTES = (4 + 16 / 128) / 8
"""The same of a payload of 4 bits; it is sent from one buffer and received in another."""


@pytest.fixture(scope="module")
def facts(pool: WorkerPool) -> dict[str, dict[str, Any]]:
    return pool.run(recipe_facts.facts, RECIPES, world_size=1, timeout=300)[0]


def test_no_recipe_is_left_out() -> None:
    assert {path.stem for path in RECIPES} == CPU | set(PUBLISHED)


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_dry_run_passes_and_leaves_nothing(recipe: Path, facts: dict[str, dict[str, Any]]) -> None:
    found = facts[recipe.stem]
    assert (found["status"], found["left"]) == (0, [])
    launch = _resolved(found["printed"])["launch"]
    assert launch["device"] == ("cpu" if recipe.stem in CPU else "cuda")
    assert ("GLOO_SOCKET_IFNAME=lo" in found["printed"]) == (recipe.stem in CPU)
    assert f"--nproc-per-node={launch['nproc_per_node']}" in found["printed"]


def _resolved(printed: str) -> dict[str, Any]:
    return yaml.safe_load(printed.partition("# configuration\n")[2])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str, facts: dict[str, dict[str, Any]]) -> None:
    """Exactly, where the rows that only pad the vocabulary are left out; those are less than 0.1 %."""
    args, counted = facts[name]["args"], sum(facts[name]["elements"].values())
    assert counted == PUBLISHED[name]
    padding = _padded(args) - args["vocab_size"]
    assert 0 <= 2 * padding * args["hidden_size"] < 0.001 * counted


def _padded(args: dict[str, Any]) -> int:
    """Rows of the embedding on all tensor-parallel ranks, as Megatron pads them."""
    multiple = args["make_vocab_size_divisible_by"] * args["tensor_model_parallel_size"]
    return -(-args["vocab_size"] // multiple) * multiple


def test_sizes_fit_together(recipe: Path, facts: dict[str, dict[str, Any]]) -> None:
    args, launch = facts[recipe.stem]["args"], _resolved(facts[recipe.stem]["printed"])["launch"]
    tensor, pipeline = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    context, data, experts = args["context_parallel_size"], args["data_parallel_size"], args["num_experts"]
    world = launch["nnodes"] * launch["nproc_per_node"]
    assert world == args["world_size"] == tensor * pipeline * context * data
    assert tensor <= launch["nproc_per_node"], "tensor parallelism must not leave the node"
    assert args["global_batch_size"] % (args["micro_batch_size"] * data) == 0
    assert args["num_layers"] % pipeline == 0
    assert args["num_attention_heads"] % tensor == 0
    groups = args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"]
    assert groups % tensor == 0
    assert args["ffn_hidden_size"] % tensor == 0
    if experts:
        expert_ranks = args["expert_model_parallel_size"]
        assert experts % expert_ranks == 0
        assert (world // pipeline) % (expert_ranks * args["expert_tensor_parallel_size"]) == 0
        assert args["moe_router_topk"] <= experts
    assert args["seq_length"] <= args["max_position_embeddings"]


@pytest.mark.parametrize("job", sorted(path.stem for path in shipped("configs/jobs").glob("*.yaml")))
def test_jobs_make_as_few_micro_batches_as_they_say(job: str) -> None:
    file = shipped(f"configs/jobs/{job}.yaml")
    header = " ".join(
        line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("#")
    )
    stated = re.findall(r"(\d+)(?: micro-batch\w*)? of (\w+) \(DP (\d+)\)", header)
    assert {model for _, model, _ in stated} == {"llama3_8b", "qwen3_30b_a3b"}
    for microbatches, model, replicas in stated:
        run = configuration.load(shipped(f"configs/models/{model}.yaml"), and_files=[file])
        flags = run.megatron
        parts = [flags.get(f"{way}_model_parallel_size", 1) for way in ("tensor", "pipeline")]
        data = run.launch.nnodes * run.launch.nproc_per_node // math.prod(parts)
        assert data == int(replicas)
        assert flags["global_batch_size"] == int(microbatches) * data * flags["micro_batch_size"]
        assert 1 <= int(microbatches) <= 8
        assert flags["grad_reduce_in_bf16"]
        assert run.compression.weight_gather == "exact"
        assert flags["lr_warmup_iters"] < flags["train_iters"]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_what_the_header_says(name: str, facts: dict[str, dict[str, Any]]) -> None:
    args, header = facts[name]["args"], (shipped("configs/models") / f"{name}.yaml").read_text()
    stated = re.search(r"# GPUs: (\d+) = (\d+) x (\d+) \(TP (\d+), PP (\d+), EP (\d+), DP (\d+)\)\n", header)
    assert stated is not None
    launch = _resolved(facts[name]["printed"])["launch"]
    sizes = ("tensor_model", "pipeline_model", "expert_model", "data")
    assert [int(number) for number in stated.groups()] == [
        args["world_size"],
        launch["nnodes"],
        launch["nproc_per_node"],
        *(args[f"{size}_parallel_size"] for size in sizes),
    ]
    memory = re.search(
        r"# Memory per GPU: ([\d.]+) GB of weights, gradients, optimizer, LoCo's error and weight gather; "
        r"payload buffers ([\d.]+) GB; NCCL up to ([\d.]+) GB; activations about (\d+) GB\n",
        header,
    )
    assert memory is not None
    state, activations = _state_bytes(facts[name], launch["nproc_per_node"]), _activation_bytes(args)
    buffers = _buffer_bytes(facts[name], launch["nproc_per_node"])
    assert float(memory[1]) == pytest.approx(state / 1e9, rel=0.01)
    assert float(memory[2]) == pytest.approx(buffers / 1e9, abs=0.06)
    assert float(memory[4]) == pytest.approx(activations / 1e9, rel=0.05)
    communicators = NCCL_BYTES * (2 if args["num_experts"] else 1)
    assert float(memory[3]) == pytest.approx(communicators / 1e9)
    assert state + buffers + activations + communicators < 76e9, "80 GB, less what the allocator takes"


def _shares(found: dict[str, Any], per_node: int) -> tuple[float, float, int, int]:
    """Dense and expert elements of the fullest GPU, and how many ranks of their groups share a node."""
    args, elements = found["args"], found["elements"]
    tensor, pipeline = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    padded = _padded(args) * args["hidden_size"]
    layers = elements["dense"] / pipeline / tensor  # norms and routers are whole on every rank: below 0.1 %
    dense = layers + padded / tensor * (2 if pipeline == 1 else 1)
    expert = elements.get("experts", 0) / pipeline / args["expert_model_parallel_size"]
    # Data-parallel ranks on one node share the error of the node's sum (two hops).
    on_node = per_node // tensor if args["world_size"] > per_node else 1
    expert_on_node = max(per_node // args["expert_model_parallel_size"], 1) if on_node > 1 else 1
    return dense, expert, on_node, expert_on_node


def _buffer_bytes(found: dict[str, Any], per_node: int) -> float:
    """Bytes of the payloads on their way, and of a node's sums in fp32: docs/clusters.md has the formula."""
    args = found["args"]
    dense, expert, on_node, expert_on_node = _shares(found, per_node)
    under_way = 1  # later stages of a pipeline have one bucket of dense elements, and one of experts'
    if args["pipeline_model_parallel_size"] == 1:  # an embedding, or Megatron's size; two at a time
        tensor = args["tensor_model_parallel_size"]
        dense = max(40e6, 1e6 * args["data_parallel_size"], _padded(args) * args["hidden_size"] / tensor)
        under_way, expert = 2, 0  # the recipes with experts have pipelines
    return sum(
        elements / ranks * (under_way * 2 * PAYLOAD_BYTES + (4 if ranks > 1 else 0))
        for elements, ranks in ((dense, on_node), (expert, expert_on_node))
    )


def _state_bytes(found: dict[str, Any], per_node: int) -> float:
    """Bytes of the fullest GPU: docs/clusters.md has the formula."""
    args = found["args"]
    pipeline = args["pipeline_model_parallel_size"]
    dense, expert, on_node, expert_on_node = _shares(found, per_node)
    replicas = args["data_parallel_size"]
    expert_replicas = args["world_size"] // pipeline // args["expert_model_parallel_size"]
    owned = 12 + 4  # the optimizer; old weights, and messages of as many bytes at most
    return dense * (2 + 4 + owned / replicas + (ERROR_BYTES + TABLE_BYTES) / on_node) + expert * (
        2 + 4 + owned / expert_replicas + (ERROR_BYTES + TABLE_BYTES) / expert_on_node
    )


def _with_layers(found: dict[str, Any], layers: int) -> dict[str, Any]:
    """The facts of a recipe with fewer layers."""
    args, elements = dict(found["args"]), dict(found["elements"])
    elements["dense"] *= layers / args["num_layers"]
    args["num_layers"] = layers
    return {"args": args, "elements": elements}


@pytest.mark.parametrize(
    "layers", [pytest.param(8, id="8 layers"), pytest.param(80, marks=pytest.mark.slow, id="all layers")]
)
def test_the_memory_is_what_the_code_allocates(
    layers: int, pool: WorkerPool, facts: dict[str, dict[str, Any]]
) -> None:
    """The second stage of the largest recipe, whose dense elements are one bucket."""
    recipe = shipped("configs/models") / "llama2_70b.yaml"
    (found,) = pool.run(stage_memory.allocated, recipe, 1, layers, world_size=1, timeout=500)
    counted = _with_layers(facts["llama2_70b"], layers)
    buffers = found.pop("buffers")
    assert buffers == pytest.approx(_buffer_bytes(counted, 8), rel=0.05)
    assert sum(found.values()) == pytest.approx(_state_bytes(counted, 8), rel=0.05)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shards_are_multiples_of_16_elements(
    name: str, pool: WorkerPool, facts: dict[str, dict[str, Any]]
) -> None:
    """So that they are loaded and stored 16 elements at a time."""
    args = facts[name]["args"]
    assert args["ddp_pad_buckets_for_high_nccl_busbw"]
    replicas = args["data_parallel_size"]
    experts = args["world_size"] // args["pipeline_model_parallel_size"] // args["expert_model_parallel_size"]
    for ranks in {replicas, experts if args["num_experts"] else replicas}:
        assert pool.run(stage_memory.bucket_divisor, ranks, world_size=1)[0] % (16 * ranks) == 0


def _activation_bytes(args: dict[str, Any]) -> float:
    """bf16, flash attention, nothing recomputed; a pipeline's first stage holds as much as all layers do."""
    hidden, tokens = args["hidden_size"], args["seq_length"] * args["micro_batch_size"]
    heads = args["num_attention_heads"]
    query = heads * (args["kv_channels"] or hidden // heads)
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    feed_forward = 6 * args["ffn_hidden_size"]
    if args["num_experts"]:
        feed_forward = args["moe_router_topk"] * (6 * args["moe_ffn_hidden_size"] + 4 * hidden)
    layer = 8 * hidden + 4 * query + 4 * query * groups / heads + feed_forward
    logits = 8 * args["vocab_size"] if args["pipeline_model_parallel_size"] == 1 else 0
    return tokens * (layer * args["num_layers"] + logits) / args["tensor_model_parallel_size"]
