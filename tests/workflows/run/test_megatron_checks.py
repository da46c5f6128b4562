"""What would end ranks late, or without a word of a flag, ends in one line before any process starts."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import pytest
from worker_pool import in_warm_process

from megatron_patch.errors import UserError
from megatron_patch.megatron import run_script
from megatron_patch.workflows import cli
from megatron_patch.workflows.run import configuration, launcher, megatron_flags, prepare
from megatron_patch.workflows.run.configuration import shipped

TINY, MOE = "llama_tiny", "moe_tiny"


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_flags.build_parser()


def checked(recipe: str, settings: str, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Megatron's arguments for a recipe with settings `key=value ...` over it."""
    overrides = ["megatron." + setting for setting in settings.split()]
    run = configuration.load(shipped(f"configs/models/{recipe}.yaml"), overrides)
    local = {"transformer_impl": "local", "no_persist_layer_norm": True, "no_rope_fusion": True}
    made_up = {"vocab_size": 257, "tokenizer_type": "NullTokenizer", "mock_data": True}
    flags = [
        *megatron_flags.flags_of({**local, **made_up, **run.megatron}, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
    ]
    with prepare.assumed_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a job's variables do
        return megatron_flags.check(run, flags, parser)


@pytest.mark.parametrize(
    ("recipe", "settings", "line"),
    [
        # in Megatron's words
        (TINY, "min_lr=1", "AssertionError: arguments.py:LINE: assert args.min_lr <= args.lr"),
        (TINY, "train_samples=99", "expected iteration-based training"),
        (TINY, "hidden_size=130", "assert args.hidden_size % args.num_attention_heads == 0"),
        (TINY, "seq_length=128", "max_position_embeddings (64) must be greater than or equal to seq_length"),
        (TINY, "seq_length=null", "seq_length is not None"),
        (TINY, "hidden_size=null", "hidden_size argument is None"),
        (TINY, "bf16=true fp16=true", "assert not args.bf16"),
        (TINY, "num_layers=3 pipeline_model_parallel_size=2", "Number of layers should be divisible"),
        (TINY, "micro_batch_size=null", "micro_batch_size is not None"),
        (MOE, "expert_model_parallel_size=3", "Number of experts should be a multiple"),
        (TINY, "global_batch_size=30", "(30) must be divisible by"),
        (TINY, "tensor_model_parallel_size=3", "world size (4) is not divisible by"),
        (TINY, "micro_batch_size=0", "assert args.micro_batch_size > 0"),
        # what it does not say, or without a flag's name
        (TINY, "lr_warmup_iters=200", "megatron.lr_warmup_iters: 200 must be below the 200 steps"),
        (TINY, "lr=null", "lr: must be given"),
        (TINY, "train_iters=0", "train_iters: 0 must be 1 or more"),
        (TINY, "num_attention_heads=0", "num_attention_heads: 0 must be 1 or more"),
        (
            TINY,
            "group_query_attention=true num_query_groups=3",
            "num_attention_heads: 8 must be a multiple of megatron.num_query_groups, 3",
        ),
        (TINY, "kv_channels=15", "kv_channels: 15 (hidden_size / num_attention_heads) must be even"),
        (TINY, "ffn_hidden_size=171", "ffn_hidden_size: 171 must be even for swiglu"),
        (
            TINY,
            "ffn_hidden_size=170 tensor_model_parallel_size=2",
            "ffn_hidden_size: 170 / tensor_model_parallel_size 2 must be even for swiglu",
        ),
        (MOE, "moe_router_topk=5", "moe_router_topk: 5 must not be above megatron.num_experts, 4"),
        (TINY, "tensor_model_parallel_size=0", "tensor_model_parallel_size: 0 must be 1 or more"),
        (TINY, "log_interval=0", "log_interval: 0 must be 1 or more"),
        (TINY, "save_interval=0", "save_interval: 0 must be 1 or more"),
        (TINY, "eval_interval=0", "eval_interval: 0 must be 1 or more"),
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
        (TINY, ""),
        (MOE, ""),
        (TINY, "train_iters=21"),
        (TINY, "lr_warmup_iters=-1"),
        (TINY, "lr_warmup_iters=0 lr_decay_iters=5"),
        (TINY, "lr_decay_style=WSD lr_wsd_decay_iters=300"),
        (TINY, "train_iters=null train_samples=2000 lr_warmup_iters=0 lr_warmup_samples=64"),
        (TINY, "num_query_groups=3"),  # nothing reads it without group_query_attention
        (TINY, "group_query_attention=true num_query_groups=2 tensor_model_parallel_size=4"),
        (TINY, "hidden_size=120 rotary_percent=0.5"),
        (TINY, "kv_channels=15 position_embedding_type=learned_absolute"),
        (TINY, "eval_iters=0"),
        (TINY, "eval_interval=-1"),
        (TINY, "fp16=true"),
        (TINY, "bf16=true"),
        (TINY, "loss_scale=-1"),
        (TINY, "optimizer=sgd use_distributed_optimizer=false"),
        (TINY, "ddp_bucket_size=0"),
        (TINY, "exit_interval=0"),
        (TINY, "mtp_num_layers=1"),
        (TINY, "recompute_granularity=full recompute_method=uniform recompute_num_layers=1"),
        (TINY, "num_layers=4 pipeline_model_parallel_size=2 num_layers_per_virtual_pipeline_stage=1"),
        (TINY, "split=5 mock_data=true"),
        (TINY, "mock_data=false data_path=[set] split=99,1,0"),
        (MOE, "tensor_model_parallel_size=2 sequence_parallel=true"),
        (MOE, "moe_router_topk=4 moe_token_dispatcher_type=allgather"),
        (MOE, "moe_router_load_balancing_type=none moe_aux_loss_coeff=0"),
    ],
)
def test_what_trains_is_not_refused(recipe: str, settings: str, parser: argparse.ArgumentParser) -> None:
    assert checked(recipe, settings, parser).num_layers


# --- the whole command -----------------------------------------------------------------------------------

MISTAKES = {
    "heads": ["megatron.num_attention_heads=7"],
    "groups": ["megatron.group_query_attention=true", "megatron.num_query_groups=3"],
    "log": ["megatron.log_interval=0"],
}


def run_commands(folder: str) -> None:
    """In a process of its own: every mistake's command; its exit status, and what it wrote and started."""
    started: list[str] = []
    launcher.start = lambda *args, **kwargs: started.append("a process")
    made_up = ["megatron.mock_data=true", "megatron.tokenizer_type=NullTokenizer", "megatron.vocab_size=257"]
    config = str(shipped("configs/models/llama_tiny.yaml"))
    found = {}
    for name, overrides in MISTAKES.items():
        with Path(folder, f"{name}.err").open("w") as said:
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            data = ["data.path=null", "data.source=null"]
            out = Path(folder, name)
            status = cli.main(["train", config, *overrides, *made_up, *data, "--out", str(out)])
            os.dup2(kept, 2)
        found[name] = {"status": status, "started": started, "folder": out.exists()}
    Path(folder, "found.json").write_text(json.dumps(found))


def test_the_command_ends_before_anything_starts_or_is_written(tmp_path: Path) -> None:
    in_warm_process(run_commands, str(tmp_path), log=tmp_path / "output")
    found = json.loads((tmp_path / "found.json").read_text())
    for name in MISTAKES:
        assert found[name] == {"status": 2, "started": [], "folder": False}
        lines = (tmp_path / f"{name}.err").read_text().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("megatron-loco: error: megatron")


# --- where a rank asserts all the same -------------------------------------------------------------------


def test_a_rank_s_bare_assertion_shows_its_source_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "scheduler.py"
    module.write_text("def step(warmup, end):\n    assert (\n        warmup < end\n    )\n")
    monkeypatch.setenv("MEGATRON_LOCO_FAILURES", str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    space: dict[str, object] = {}
    exec(compile(module.read_text(), str(module), "exec"), space)
    for wanted, call in (
        ("AssertionError: scheduler.py:2: assert ( warmup < end )", lambda: space["step"](3, 2)),
        ("AssertionError: said", lambda: (_ for _ in ()).throw(AssertionError("said"))),
    ):
        with pytest.raises(AssertionError) as caught:
            call()
        run_script._leave_failure(caught.value, user=False)
        assert json.loads((tmp_path / "rank-2.json").read_text())["error"] == wanted
