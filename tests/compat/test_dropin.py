"""The ways in for jobs that exist already: post-wrap hooks, two lines, the launcher's flags, the job's W&B.

On each megatron-core that is supported. What a whole run of an untouched script shows is in
tests/workflows/test_engine.py, for the locked release.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOCO = {"method": "loco", "bits": 4, "start_step": 0}
STEPS = 3

# --- hooks and lines: megatron/attach.py --------------------------------------------------------------


def bridge(chunks: list[Any], hooks: list[Any]) -> list[Any]:
    """What Megatron-Bridge's `provide_distributed_model` does with hooks given to `register_post_wrap_hook`.

    They are called in order with the list of wrapped chunks, each with what the one before returned; the last
    answer is the model from then on, unless it is None.
    """
    model: Any = chunks
    for hook in hooks:
        model = hook(model)
    return chunks if model is None else model


def trained(way: str) -> tuple[list[bool], Any]:
    """Which of two model chunks are attached, and their reduced shards over some steps, with compression
    switched on in one of the ways."""
    from functools import partial

    import torch
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    config = megatron_patch.CompressionConfig(**LOCO)
    try:
        if way == "enable":
            megatron_patch.enable(config)
        tinies = [build(seed=seed) for seed in (1, 2)]  # an interleaved pipeline's chunks come as one list
        chunks = [tiny.ddp for tiny in tinies]
        if way == "attach":
            assert megatron_patch.attach(chunks, config) is chunks
        elif way == "bridge":
            seen: list[Any] = []
            look = [lambda model: seen.append(model) or model]
            assert bridge(chunks, [*look, partial(megatron_patch.attach, config=config), *look]) is chunks
            assert seen == [chunks, chunks]  # the hook that comes after it gets the wrapped chunks too
        shards = [t.step(t.random_gradients(step)) for step in range(STEPS) for t in tinies]
        attached = [session_of(chunk) is not None for chunk in chunks]
    finally:
        megatron_patch.disable()
    return attached, torch.cat([part.reshape(-1) for of_step in shards for part in of_step])


def test_a_post_wrap_hook_two_lines_and_attach_give_the_same_compressed_gradients(pool):
    import torch

    runs = {way: pool.run(trained, way, world_size=2) for way in ("stock", "attach", "enable", "bridge")}
    assert [attached for attached, _ in runs["stock"]] == [[False, False]] * 2
    for rank in range(2):
        _, stock = runs["stock"][rank]
        attached, direct = runs["attach"][rank]
        assert attached == [True, True]
        assert not torch.equal(direct, stock)  # compressed
        assert (direct - stock).norm() < 0.2 * stock.norm()  # 4 bits: about 18 dB
        for way in ("enable", "bridge"):
            attached, shards = runs[way][rank]
            assert attached == [True, True]
            assert torch.equal(shards, direct)


def built_by_megatron() -> str | bool:
    """Megatron's own model builder with the hook in `post_wrap_hooks`: is what it returns attached?"""
    from functools import partial
    from importlib import util

    if util.find_spec("megatron.training.models") is None or (
        util.find_spec("megatron.training.models.gpt") is None
    ):
        return "this release has no builder of GPT models"
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    hook = partial(megatron_patch.attach, config=megatron_patch.CompressionConfig(**LOCO))
    asked = GPTModelConfig(
        transformer=TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2),
        transformer_layer_spec=lambda config: get_gpt_layer_local_spec(),
        vocab_size=64,
        seq_length=8,
        post_wrap_hooks=[hook],
    )
    try:
        (chunk,) = GPTModelBuilder(asked).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        )
        return session_of(chunk) is not None
    finally:
        megatron_patch.disable()


def test_megatron_s_own_model_builder_takes_it_as_a_post_wrap_hook(pool):
    found = pool.run(built_by_megatron, world_size=2)
    if isinstance(found[0], str):
        pytest.skip(found[0])
    assert found == [True, True]


# --- the launcher: megatron/run_script.py, arguments.py -----------------------------------------------


def helped() -> str:
    """What `--help` of a script prints that parses with Megatron's own parse_args."""
    import contextlib
    import io

    from megatron.training import arguments

    from megatron_patch.megatron.arguments import after_parsing

    original = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = after_parsing(original, lambda args: None, {})
    sys.argv = ["pretrain.py", "--help"]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as end:
            arguments.parse_args()
    finally:
        arguments.add_megatron_arguments = original
    assert not end.value.code
    return text.getvalue()


def test_help_has_megatron_s_flags_and_one_for_every_option(pool):
    from megatron_patch.config import CompressionConfig

    (text,) = pool.run(helped, world_size=1)
    assert "--use-distributed-optimizer" in text
    names = [option.name for option in dataclasses.fields(CompressionConfig)] + ["device", "output"]
    missing = [flag for name in names if (flag := f"--compression-{name.replace('_', '-')}") not in text]
    assert missing == []
    assert "--no-compression-attach" in text


@pytest.mark.slow
def test_the_megatron_beside_the_script_is_the_one_that_is_used(tmp_path: Path) -> None:
    """As with `python /checkout/pretrain_gpt.py`, which imports the checkout's Megatron from any folder."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("raise SystemExit(7)\n")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patch.launch", str(tmp_path / "pretrain_gpt.py")],
        cwd=Path(__file__).resolve().parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr[-2000:]


# --- the job's W&B: megatron/metrics.py ---------------------------------------------------------------


def logged_to_wandb(config: dict[str, Any]) -> tuple[list[tuple[dict[str, float], int]], list[bool]]:
    """What a writer gets that stands where Megatron keeps its W&B run, in STEPS steps of a real exchange; and
    whether each of them measured."""
    from types import SimpleNamespace

    import torch
    from megatron.training import global_vars, training
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    tiny = build()
    calls: list[tuple[dict[str, float], int]] = []
    measured = []
    # The loop around the exchange, with the arguments that tests/compat/test_contract.py finds in Megatron's.
    loop = {
        "train_step": lambda model, step: tiny.step(tiny.random_gradients(step)),
        "training_log": lambda loss_dict, iteration, grad_norm: None,
        "evaluate_and_print_results": lambda prefix, model: None,
        "evaluate": lambda: ({},),
    }
    before = {name: getattr(training, name) for name in loop}
    saved = global_vars._GLOBAL_ARGS, global_vars._GLOBAL_WANDB_WRITER
    try:
        vars(training).update(loop)
        global_vars._GLOBAL_ARGS = SimpleNamespace(
            log_interval=2, train_iters=STEPS, global_batch_size=2, seq_length=8
        )
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # as Megatron: on the last
            global_vars._GLOBAL_WANDB_WRITER = SimpleNamespace(
                log=lambda values, step: calls.append((dict(values), step))
            )
        megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(**config))
        state = session_of(tiny.ddp)
        assert state is not None
        for step in range(1, STEPS + 1):
            global_vars._GLOBAL_ARGS.curr_iteration = step - 1
            training.train_step(model=[tiny.ddp], step=step)
            measured.append(state.measures)
            training.training_log(
                loss_dict={"lm loss": torch.tensor(2.0)}, iteration=step, grad_norm=torch.tensor(1.0)
            )
    finally:
        megatron_patch.disable()
        vars(training).update(before)
        global_vars._GLOBAL_ARGS, global_vars._GLOBAL_WANDB_WRITER = saved
    return calls, measured


def test_compression_metrics_go_to_the_job_s_own_wandb_run(pool):
    (first, _), (last, measured) = pool.run(logged_to_wandb, LOCO, world_size=2)
    assert first == []
    assert measured == [False, True, True]
    assert [step for _, step in last] == [2, 3]  # every log_interval-th step, and the last one
    for values, _ in last:
        assert values["compression/gradient_wire_bytes"] > 0
        assert 10 < values["compression/compression_snr_db"] < 30
        assert 0 < values["compression/compensation_norm_ratio"] < 0.5
        assert values["compression/non_finite_blocks"] == 0
        assert values["compression/compression_seconds"] > 0


def test_without_compression_the_run_gets_the_bytes_and_no_quality(pool):
    _, (last, _) = pool.run(logged_to_wandb, {"method": "none"}, world_size=2)
    assert [step for _, step in last] == [2, 3]
    for values, _ in last:
        assert values["compression/gradient_wire_bytes"] > 0
        assert "compression/compression_snr_db" not in values
