"""The `megatron:` section against Megatron's real parser and its own validation."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_patch.errors import UserError
from megatron_patch.workflows.run import configuration, megatron_flags
from megatron_patch.workflows.run.configuration import RunConfig, shipped

LLAMA = shipped("configs/models/llama_tiny.yaml")
MEGATRON_FSDP = ["megatron.use_megatron_fsdp=true", "megatron.data_parallel_sharding_strategy=optim_grads"]
CPU = ["launch.device=cpu", "launch.nproc_per_node=4"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_flags.build_parser()


def flags(run: RunConfig, parser: argparse.ArgumentParser) -> list[str]:
    local = {"transformer_impl": "local", "no_persist_layer_norm": True, "no_rope_fusion": True}
    settings = {
        **local,
        "vocab_size": 257,
        "tokenizer_type": "NullTokenizer",
        "mock_data": True,
        **run.megatron,
    }
    return [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
    ]


def test_values_become_flags(parser: argparse.ArgumentParser) -> None:
    section = {
        "num_layers": 4,
        "swiglu": True,
        "bf16": False,
        "lr": 1e-3,
        "data_path": ["a", "b"],
        "save": None,
    }
    found = megatron_flags.flags_of(section, parser)
    assert found == ["--num-layers", "4", "--swiglu", "--lr", "0.001", "--data-path", "a", "b"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"num_layer": 4}, ["megatron.num_layer", "did you mean num_layers"]),
        ({"num_layers": "many"}, ["megatron.num_layers: ", "invalid int value: 'many'"]),
        ({"num_layers": 2.5}, ["megatron.num_layers: ", "invalid int value: '2.5'"]),
        ({"lr": "fast"}, ["megatron.lr: ", "invalid float value: 'fast'"]),
        ({"swiglu": 1}, ["megatron.swiglu", "1", "true or false"]),
        ({"num_layers": True}, ["megatron.num_layers", "True", "a finite number, or text"]),
        ({"lr": float("inf")}, ["megatron.lr", "inf", "a finite number"]),
        ({"compression_bits": 2}, ["megatron.compression_bits", "compression.bits"]),
        ({"help": True}, ["megatron.help", "no such flag"]),
        ({"normalization": "RMSNrom"}, ["megatron.normalization: invalid choice", "RMSNrom", "RMSNorm"]),
    ],
)
def test_bad_flags(section: dict[str, object], words: list[str], parser: argparse.ArgumentParser) -> None:
    with pytest.raises(UserError) as caught:
        parser.parse_args(megatron_flags.flags_of(section, parser))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tiny_llama_passes_megatrons_own_validation(parser: argparse.ArgumentParser) -> None:
    run = configuration.load(LLAMA, CPU)
    args = megatron_flags.check(run, flags(run, parser), parser)
    assert (args.data_parallel_size, args.global_batch_size) == (4, run.megatron["global_batch_size"])
    assert (args.compression_method, args.compression_bits) == ("loco", 4)


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_muon_is_not_refused(distributed: str, parser: argparse.ArgumentParser) -> None:
    muon = [
        "megatron.optimizer=muon",
        "megatron.bf16=true",
        f"megatron.use_distributed_optimizer={distributed}",
    ]
    run = configuration.load(LLAMA, [*CPU, *muon])
    args = megatron_flags.check(run, flags(run, parser), parser)
    assert args.use_layer_wise_distributed_optimizer is (distributed == "true")


def test_a_replicated_optimizer_is_not_refused(parser: argparse.ArgumentParser) -> None:
    run = configuration.load(LLAMA, [*CPU, "megatron.use_distributed_optimizer=false"])
    assert megatron_flags.check(run, flags(run, parser), parser).use_distributed_optimizer is False


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        *(
            (
                ["megatron.use_megatron_fsdp=true", f"megatron.data_parallel_sharding_strategy={strategy}"],
                [f"data_parallel_sharding_strategy: '{strategy}'", "compression", "use optim_grads"],
            )
            for strategy in ("no_shard", "optim")
        ),
        (
            ["megatron.use_megatron_fsdp=true", "compression.method=onebit_adam"],
            ["use_megatron_fsdp", "onebit_adam", "use loco"],
        ),
        (
            [*MEGATRON_FSDP, "megatron.outer_dp_sharding_strategy=optim"],
            ["outer_dp_sharding_strategy: 'optim'", "drops gradient scaling", "no_shard"],
        ),
        (
            [
                *MEGATRON_FSDP,
                "megatron.ckpt_format=fsdp_dtensor",
                "megatron.num_distributed_optimizer_instances=2",
                "megatron.overlap_grad_reduce=false",
                "megatron.overlap_param_gather=false",
            ],
            ["num_distributed_optimizer_instances: 2", "without overlap_grad_reduce", "set it"],
        ),
        (
            ["megatron.use_torch_fsdp2=true", "compression.method=onebit_adam"],
            ["use_torch_fsdp2", "onebit_adam", "use loco"],
        ),
        *(
            (
                [f"megatron.{fsdp}=true", "compression.method=none", "compression.weight_gather=exact"],
                [named, "weight_gather exact", "weights are sharded"],
            )
            for fsdp, named in (
                ("use_megatron_fsdp", "data_parallel_sharding_strategy: 'optim_grads_params'"),
                ("use_torch_fsdp2", "use_torch_fsdp2"),
            )
        ),
        (
            ["megatron.tensor_parallel_num_weight_shards=2"],
            ["tensor_parallel_num_weight_shards: 2", "compression", "leave it out"],
        ),
        (["megatron.optimizer=lion"], ["optimizer", "'lion'", "adam, sgd and muon"]),
        (["megatron.optimizer=muon", "compression.method=onebit_adam"], ["'muon'", "use adam"]),
        (
            ["megatron.num_attention_heads=5"],
            ["args.hidden_size % args.num_attention_heads == 0"],
        ),
        (
            ["megatron.train_iters=10", "megatron.lr_decay_iters=5", "megatron.train_samples=3"],
            ["expected iteration-based training"],
        ),
    ],
)
def test_what_cannot_run_is_refused(
    overrides: list[str], words: list[str], parser: argparse.ArgumentParser
) -> None:
    run = configuration.load(LLAMA, [*CPU, *overrides])
    with pytest.raises(UserError) as caught:
        megatron_flags.check(run, flags(run, parser), parser)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ("fsdp" in str(overrides) and len(str(caught.value)) > 150)


def test_stock_megatron_may_use_what_compression_cannot(parser: argparse.ArgumentParser) -> None:
    overrides = ["compression.attach=false", "megatron.optimizer=lion", "megatron.bf16=true"]
    run = configuration.load(LLAMA, [*CPU, *overrides])
    assert megatron_flags.check(run, flags(run, parser), parser).compression_attach is False


@pytest.mark.parametrize("method", ["none", "loco"])
def test_sums_in_fp32_may_be_asked_for(method: str, parser: argparse.ArgumentParser) -> None:
    overrides = [f"compression.method={method}", "megatron.ddp_reduce_scatter_with_fp32_accumulation=true"]
    run = configuration.load(LLAMA, [*CPU, *overrides])
    args = megatron_flags.check(run, flags(run, parser), parser)
    assert (args.compression_method, args.ddp_reduce_scatter_with_fp32_accumulation) == (method, True)


def test_compression_flags_give_the_same_configuration_back(parser: argparse.ArgumentParser) -> None:
    from megatron_patch.megatron.arguments import config_from_arguments

    overrides = [
        "compression.block_size=shard",
        "compression.error_beta=0.5",
    ]
    run = configuration.load(LLAMA, overrides)
    args = parser.parse_args(megatron_flags.compression_flags(run.compression, run.attach))
    assert config_from_arguments(args) == run.compression


def test_muon_s_default_method_is_the_same_from_a_file_and_from_flags(tmp_path: Path) -> None:
    from megatron_patch.megatron.arguments import add_compression_arguments, config_from_arguments

    file = tmp_path / "muon.yaml"
    file.write_text("megatron: {optimizer: muon}\ncompression: {bits: 2}\n", encoding="utf-8")
    run = configuration.load(file)
    parser = add_compression_arguments(argparse.ArgumentParser())
    parser.add_argument("--optimizer")
    args = parser.parse_args(["--compression-bits", "2", "--optimizer", "muon"])
    assert run.compression.method == "error_feedback"
    assert config_from_arguments(args) == run.compression
