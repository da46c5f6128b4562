"""For jobs that exist already, on each megatron-core that is supported: the launcher's flags, the job's W&B.

The doors are in tests/with_megatron/test_doors.py, whole runs in tests/workflows/test_engine.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from with_megatron.seam_runs import session_of
from with_megatron.tiny_model import build

import megatron_patch
from megatron_patch.config import CompressionConfig

LOCO = {"method": "loco", "bits": 4, "start_step": 0}
STEPS = 3


def helped() -> str:
    """What `--help` of a script prints that parses with Megatron's own parse_args."""
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


def logged_to_wandb() -> tuple[list[tuple[dict[str, float], int]], list[bool]]:
    """What a writer gets that stands where Megatron keeps its W&B run, in STEPS steps of a real exchange; and
    whether each of them measured."""
    from megatron.training import global_vars, training

    tiny = build()
    calls: list[tuple[dict[str, float], int]] = []
    measured = []
    # The loop around the exchange, with the arguments that Megatron's has.
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
        megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(**LOCO))
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
    (first, _), (last, measured) = pool.run(logged_to_wandb, world_size=2)
    assert first == []
    assert measured == [False, True, True]
    assert [step for _, step in last] == [2, 3]  # every log_interval-th step, and the last one
    for values, _ in last:
        assert values["compression/gradient_wire_bytes"] > 0
        assert 10 < values["compression/compression_snr_db"] < 30
        assert 0 < values["compression/compensation_norm_ratio"] < 0.5
        assert values["compression/non_finite_blocks"] == 0
        assert values["compression/compression_seconds"] > 0
