"""The `megatron:` section against Megatron's real parser and validation, and what compression cannot serve.

What would end ranks late, or without a word of a flag, ends in one line before any process starts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from megatron_patch.errors import UserError
from megatron_patch.megatron import run_script
from megatron_patch.megatron.arguments import add_compression_arguments, config_from_arguments
from megatron_patch.workflows.run import configuration, megatron_flags
from megatron_patch.workflows.run.configuration import shipped

TINY, MOE = "llama_tiny", "moe_tiny"
FSDP = "megatron.use_megatron_fsdp=true"
AT_LEAST_1 = ("tensor_model_parallel_size", "num_attention_heads", "log_interval", "save_interval")
SAMPLES = "megatron.train_iters=null megatron.train_samples=99"
SHARDED = f"{FSDP} megatron.data_parallel_sharding_strategy=optim_grads"


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_flags.build_parser()


def checked(recipe: str, settings: str, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Megatron's arguments for a recipe with settings `section.key=value ...` over it, on a GPU."""
    run = configuration.load(shipped(f"configs/models/{recipe}.yaml"), settings.split())
    local = {"transformer_impl": "local", "no_persist_layer_norm": True, "no_rope_fusion": True}
    made_up = {"vocab_size": 257, "tokenizer_type": "NullTokenizer", "mock_data": True}
    flags = [
        *megatron_flags.flags_of({**local, **made_up, **run.megatron}, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
    ]
    with megatron_flags.assumed_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8" if "fsdp" in settings else "1")  # as a job has it
        return megatron_flags.check(run, flags, parser)


def test_values_become_flags(parser: argparse.ArgumentParser) -> None:
    section = {"num_layers": 4, "swiglu": True, "bf16": False, "lr": 1e-3, "data_path": ["a", "b"]}
    found = megatron_flags.flags_of({**section, "save": None}, parser)
    assert found == ["--num-layers", "4", "--swiglu", "--lr", "0.001", "--data-path", "a", "b"]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"num_layer": 4}, "megatron.num_layer: .*did you mean num_layers"),
        ({"num_layers": 2.5}, r"megatron.num_layers: .*invalid int value: '2\.5'"),
        ({"swiglu": 1}, "megatron.swiglu: 1 .*true or false"),
        ({"num_layers": True}, "megatron.num_layers: True .*a finite number, or text"),
        ({"lr": float("inf")}, "megatron.lr: inf .*a finite number"),
        ({"compression_bits": 2}, r"megatron.compression_bits.*compression\.bits"),
        ({"help": True}, "megatron.help: .*no such flag"),
        ({"normalization": "RMSNrom"}, "megatron.normalization: invalid choice.*RMSNrom.*RMSNorm"),
    ],
)
def test_bad_flags(section: dict[str, object], line: str, parser: argparse.ArgumentParser) -> None:
    with pytest.raises(UserError, match=line):
        parser.parse_args(megatron_flags.flags_of(section, parser))


@pytest.mark.parametrize(
    ("recipe", "settings", "line"),
    [
        # in Megatron's words: a bare assertion, one with a message, one without a flag's name
        (TINY, "megatron.min_lr=1", "AssertionError: arguments.py:LINE: assert args.min_lr <= args.lr"),
        (TINY, "megatron.num_attention_heads=5", "args.hidden_size % args.num_attention_heads == 0"),
        (TINY, "megatron.hidden_size=null", "hidden_size argument is None"),
        (MOE, "megatron.expert_model_parallel_size=3", "Number of experts should be a multiple"),
        # with the keys of a recipe in place of what Megatron makes of them
        (
            TINY,
            "megatron.global_batch_size=30",
            "megatron.global_batch_size (30) must be divisible by megatron.micro_batch_size (16) * launch's",
        ),
        (TINY, "megatron.eval_global_batch_size=30", " eval_global_batch_size (30) must be divisible by"),
        (
            TINY,
            "megatron.tensor_model_parallel_size=3",
            "launch.nproc_per_node * launch.nnodes (4) is not divisible by tensor * pipeline * context",
        ),
        # what it does not say, or without a flag's name
        (TINY, "megatron.train_iters=12", "lr_warmup_iters: 20 must be below megatron.train_iters, 12"),
        (TINY, "megatron.lr_decay_iters=9", "lr_warmup_iters: 20 must be below megatron.lr_decay_iters, 9"),
        (
            TINY,
            f"{SAMPLES} megatron.lr_warmup_iters=0 megatron.lr_warmup_samples=99",
            "lr_warmup_samples: 99 must be below megatron.train_samples, 99",
        ),
        (TINY, SAMPLES, "lr_warmup_iters: 20 cannot be combined with megatron.train_samples; set one"),
        (TINY, "megatron.train_samples=99", "train_samples: 99 cannot be combined with megatron.train_iters"),
        (TINY, "megatron.lr=null", "lr: must be given"),
        (TINY, "megatron.train_iters=0", "train_iters: 0 must be 1 or more"),
        (TINY, "megatron.eval_interval=0", "eval_interval: 0 must be 1 or more"),
        *((TINY, f"megatron.{name}=0", f"{name}: 0 must be 1 or more") for name in AT_LEAST_1),
        (
            TINY,
            "megatron.group_query_attention=true megatron.num_query_groups=3",
            "num_attention_heads: 8 must be a multiple of megatron.num_query_groups, 3",
        ),
        (TINY, "megatron.kv_channels=15", "kv_channels: 15 (hidden_size / num_attention_heads) must be even"),
        (
            TINY,
            "megatron.ffn_hidden_size=170 megatron.tensor_model_parallel_size=2",
            "ffn_hidden_size: 170 / tensor_model_parallel_size 2 must be even for swiglu",
        ),
        (MOE, "megatron.moe_router_topk=5", "moe_router_topk: 5 must not be above megatron.num_experts, 4"),
        # what compression cannot serve
        (
            TINY,
            FSDP + " megatron.data_parallel_sharding_strategy=optim",
            "'optim' cannot be combined with gradient compression",
        ),
        (TINY, FSDP + " megatron.data_parallel_sharding_strategy=no_shard", "'no_shard' cannot be combined"),
        (TINY, FSDP + " compression.method=onebit_adam", "use_megatron_fsdp"),
        (TINY, SHARDED + " megatron.outer_dp_sharding_strategy=optim", "drops gradient scaling"),
        (
            TINY,
            SHARDED + " megatron.ckpt_format=fsdp_dtensor megatron.num_distributed_optimizer_instances=2 "
            "megatron.overlap_grad_reduce=false megatron.overlap_param_gather=false",
            "num_distributed_optimizer_instances: 2",
        ),
        (TINY, "megatron.use_torch_fsdp2=true compression.method=onebit_adam", "use_torch_fsdp2"),
        (
            TINY,
            "megatron.use_torch_fsdp2=true compression.method=none compression.weight_gather=exact",
            "weights are sharded",
        ),
        (
            TINY,
            FSDP + " compression.method=none compression.weight_gather=exact",
            "data_parallel_sharding_strategy: 'optim_grads_params'",
        ),
        (TINY, "megatron.optimizer=lion", "adam, sgd and muon"),
        (TINY, "megatron.optimizer=muon compression.method=onebit_adam", "use adam"),
    ],
)
def test_one_line_names_the_flag_and_what_it_must_be(
    recipe: str, settings: str, line: str, parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(UserError) as caught:
        checked(recipe, settings, parser)
    assert line in re.sub(r"\.py:\d+:", ".py:LINE:", str(caught.value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (TINY, "lr_warmup_iters=0 lr_decay_iters=5"),
        (TINY, "train_iters=null train_samples=2000 lr_warmup_iters=0 lr_warmup_samples=64"),
        (TINY, "num_query_groups=3"),  # nothing reads it without group_query_attention
        (TINY, "group_query_attention=true num_query_groups=2 tensor_model_parallel_size=4"),
        (TINY, "kv_channels=15 position_embedding_type=learned_absolute"),
        (TINY, "eval_iters=0 eval_interval=-1 exit_interval=0 ddp_bucket_size=0 loss_scale=-1"),
        (TINY, "ddp_reduce_scatter_with_fp32_accumulation=true"),
        (TINY, "optimizer=sgd use_distributed_optimizer=false"),
        (TINY, "bf16=true recompute_granularity=full recompute_method=uniform recompute_num_layers=1"),
        (TINY, "num_layers=4 pipeline_model_parallel_size=2 num_layers_per_virtual_pipeline_stage=1"),
        (TINY, "mock_data=false data_path=[set] split=99,1,0"),
        (MOE, "tensor_model_parallel_size=2 sequence_parallel=true moe_router_topk=4"),
    ],
)
def test_what_trains_is_not_refused(recipe: str, settings: str, parser: argparse.ArgumentParser) -> None:
    assert checked(recipe, " ".join(f"megatron.{one}" for one in settings.split()), parser).num_layers


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_muon_is_not_refused(distributed: str, parser: argparse.ArgumentParser) -> None:
    muon = f"megatron.optimizer=muon megatron.bf16=true megatron.use_distributed_optimizer={distributed}"
    found = checked(TINY, muon, parser)
    assert found.use_layer_wise_distributed_optimizer is (distributed == "true")


def test_stock_megatron_may_use_what_compression_cannot(parser: argparse.ArgumentParser) -> None:
    found = checked(TINY, "compression.attach=false megatron.optimizer=lion megatron.bf16=true", parser)
    assert found.compression_attach is False


def test_compression_flags_give_the_same_configuration_back(parser: argparse.ArgumentParser) -> None:
    run = configuration.load(
        shipped(f"configs/models/{TINY}.yaml"), ["compression.block_size=shard", "compression.error_beta=0.5"]
    )
    args = parser.parse_args(megatron_flags.compression_flags(run.compression, run.attach))
    assert config_from_arguments(args) == run.compression


def test_muon_s_default_method_is_the_same_from_a_file_and_from_flags(tmp_path: Path) -> None:
    file = tmp_path / "muon.yaml"
    file.write_text("megatron: {optimizer: muon}\ncompression: {bits: 2}\n", encoding="utf-8")
    run = configuration.load(file)
    parser = add_compression_arguments(argparse.ArgumentParser())
    parser.add_argument("--optimizer")
    args = parser.parse_args(["--compression-bits", "2", "--optimizer", "muon"])
    assert run.compression.method == "error_feedback"
    assert config_from_arguments(args) == run.compression


def test_a_rank_s_bare_assertion_shows_its_source_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "scheduler.py"
    module.write_text("def step(warmup, end):\n    assert (\n        warmup < end\n    )\n")
    monkeypatch.setenv("MEGATRON_LOCO_FAILURES", str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    space: dict[str, object] = {}
    exec(compile(module.read_text(), str(module), "exec"), space)
    with pytest.raises(AssertionError) as caught:
        space["step"](3, 2)
    for error, said in (
        (caught.value, "AssertionError: scheduler.py:2: assert ( warmup < end )"),
        (AssertionError("said"), "AssertionError: said"),
    ):
        run_script._leave_failure(error, user=False)
        assert json.loads((tmp_path / "rank-2.json").read_text())["error"] == said
