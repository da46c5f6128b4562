"""Every model recipe: its dry run passes, and batch, parallel sizes, GPUs and what its header says fit."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from worker_pool import WorkerPool

from megatron_patch.workflows import cli
from megatron_patch.workflows.run import configuration, megatron_flags
from megatron_patch.workflows.run.configuration import shipped
from megatron_patch.workflows.run.prepare import prepare_run

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
"""Parameters; that recipes have as many is shown in tests/workflows/plan/test_job.py."""
CPU = {"llama_tiny", "llama_tiny_bf16", "llama_1m", "llama_3m", "llama_10m", "moe_tiny"}
NCCL_BYTES = 3.3e9
"""Bytes of a group's communicator with all-to-alls, as docs/clusters.md has it."""


def dry_runs(recipes: list[Path]) -> dict[str, dict[str, Any]]:
    """In a worker: for each recipe what its dry run returns, leaves and prints, and Megatron's arguments."""
    parser = functools.cache(megatron_flags.build_parser)  # a quarter of a second each
    before, found = set(Path().iterdir()), {}
    with mock.patch.object(megatron_flags, "build_parser", parser):
        for recipe in recipes:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = cli.main(["train", str(recipe), "--dry-run", "--out", "nowhere"])
            args = vars(prepare_run(configuration.load(recipe, []), Path("nowhere"), dry=True).args)
            found[recipe.stem] = {
                "status": status,
                "left": set(Path().iterdir()) - before,
                "printed": printed.getvalue(),
                "resolved": yaml.safe_load(printed.getvalue().partition("# configuration\n")[2]),
                "args": {key: value for key, value in args.items() if isinstance(value, int | str | None)},
            }
    return found


@pytest.fixture(scope="module")
def facts(pool: WorkerPool) -> dict[str, dict[str, Any]]:
    return pool.run(dry_runs, RECIPES, world_size=1, timeout=300)[0]


@pytest.mark.parametrize("name", sorted(CPU | set(PUBLISHED)))
def test_dry_run_passes_leaves_nothing_and_sizes_fit_together(
    name: str, facts: dict[str, dict[str, Any]]
) -> None:
    assert facts.keys() == CPU | set(PUBLISHED), "no recipe is left out"
    found = facts[name]
    assert (found["status"], found["left"]) == (0, set())
    args, launch = found["args"], found["resolved"]["launch"]
    assert launch["device"] == ("cpu" if name in CPU else "cuda")
    assert ("GLOO_SOCKET_IFNAME=lo" in found["printed"]) == (name in CPU)
    assert f"--nproc-per-node={launch['nproc_per_node']}" in found["printed"]
    # What Megatron's validation of the dry run does not ask for.
    assert args["tensor_model_parallel_size"] <= launch["nproc_per_node"], "it must not leave the node"
    assert args["world_size"] == launch["nnodes"] * launch["nproc_per_node"]
    assert args["seq_length"] <= args["max_position_embeddings"]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_what_the_header_says(name: str, facts: dict[str, dict[str, Any]]) -> None:
    """Its bytes of states and buffers are the planner's: tests/workflows/plan/test_job.py."""
    args, header = facts[name]["args"], (shipped("configs/models") / f"{name}.yaml").read_text()
    assert args["ddp_pad_buckets_for_high_nccl_busbw"], "shards are loaded 16 elements at a time"
    stated = re.search(r"# GPUs: (\d+) = (\d+) x (\d+) \(TP (\d+), PP (\d+), EP (\d+), DP (\d+)\)\n", header)
    assert stated is not None
    launch = facts[name]["resolved"]["launch"]
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
    communicators = NCCL_BYTES * (2 if args["num_experts"] else 1)
    assert float(memory[3]) == pytest.approx(communicators / 1e9)
    assert float(memory[4]) == pytest.approx(activation_bytes(args) / 1e9, rel=0.05)
    assert sum(map(float, memory.groups())) < 76, "80 GB, less what the allocator takes"


def activation_bytes(args: dict[str, Any]) -> float:
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


@pytest.mark.parametrize("job", sorted(path.stem for path in shipped("configs/jobs").glob("*.yaml")))
def test_jobs_make_as_few_micro_batches_as_they_say(job: str) -> None:
    file = shipped(f"configs/jobs/{job}.yaml")
    lines = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("#")]
    stated = re.findall(r"(\d+)(?: micro-batch\w*)? of (\w+) \(DP (\d+)\)", " ".join(lines))
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
