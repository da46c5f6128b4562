"""metrics.jsonl of a run that goes on from a checkpoint: every step once. Tokens of batches that change."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from with_megatron.gpt_model import build
from with_megatron.recording import weights
from with_megatron.seam_runs import attachment_of, logged

import megatron_patch


def continue_at(path: str, step: int) -> None:
    """In a worker, which has imported Megatron: what the writer does before its first line."""
    from megatron_patch.megatron.metrics import _continue

    with _continue(Path(path), step) as stream:
        stream.write(json.dumps({"step": step, "loss": 0.5}) + "\n")


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        ("", 1, [1]),
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', 2, [1, 2]),
        ('{"step": 1}\n{"step": 2}\n{"step": 3, "lo', 3, [1, 2, 3]),  # torn by a kill
        ('{"step": 5}\n{"step": 10}\n', 10, [5, 10]),  # log_interval 5, loaded step 7
        ('{"step": 1}\n{"step": 2}\n', 1, [1]),  # no checkpoint had been written
    ],
)
def test_lines_from_the_first_new_step_on_are_replaced(pool, before, step, after, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if before:
        path.write_text(before)
    pool.run(continue_at, str(path), step, world_size=1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == after
    assert not path.with_suffix(".partial").exists()


def tokens_of_a_growing_batch(folder: str) -> list[float]:
    """In a worker: tokens of three steps, as logged; batches of 2, 4 and 6 samples of 8 tokens."""
    from megatron_patch.megatron import metrics

    run = metrics.RunMetrics(Path(folder))
    args = SimpleNamespace(global_batch_size=None, seq_length=8, log_interval=1, train_iters=3)
    with (
        mock.patch.object(metrics, "get_args", return_value=args),
        mock.patch.object(
            metrics.num_microbatches_calculator,
            "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
            mock.Mock(**{"get_current_running_global_batch_size.side_effect": [2, 4, 6]}),
        ),
    ):
        for step in (1, 2, 3):
            run._before_step({"model": []})
            run._log_step({"iteration": step, "loss_dict": {}, "grad_norm": None})
    run._file.close()
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line["tokens_per_second"] * line["step_seconds"] for line in map(json.loads, lines)]


def test_tokens_are_counted_by_the_batch_that_a_step_had(pool, tmp_path):
    """Megatron's flag says what the last one will be, or nothing where there is a schedule."""
    (tokens,) = pool.run(tokens_of_a_growing_batch, str(tmp_path), world_size=1)
    assert tokens == pytest.approx([16, 32, 48])


def of_outer_steps(folder: str, compression: dict[str, Any]) -> Any:
    """In a worker: lines and bytes of six steps, and fp32 weights before and after outer steps."""
    from megatron_patch.megatron import metrics

    gpt = build(instances=2)
    config = {"start_step": 0, "outer_interval": 3, "weight_gather": "stock"} | compression
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**config))
    run = metrics.RunMetrics(Path(folder))
    args = SimpleNamespace(global_batch_size=4, seq_length=8, log_interval=1, train_iters=6)
    kept, sent = [weights(gpt)], []
    with mock.patch.object(metrics, "get_args", return_value=args):
        for step in range(6):
            run._before_step({"model": gpt.chunks})
            gpt.step(step)
            run._log_step({"iteration": step + 1, "loss_dict": {}, "grad_norm": None})
            sent.append(megatron_patch.report(gpt.chunks).gradient_bytes)
            if step % 3 == 2:
                gpt.gather()
                kept.append(weights(gpt))
    if run._file:
        run._file.close()
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines() if dist.get_rank() == 3 else []
    return [json.loads(line) for line in lines], sent, kept


@pytest.mark.parametrize(
    "compression", [{"method": "none"}, {"method": "error_feedback", "bits": 4, "outer_delay": 1}]
)
def test_outer_steps_bytes_are_spread_over_the_steps(pool, compression, tmp_path):
    """Every line has the mean of three steps, whichever lines are logged, and the norm of what has moved."""
    found = pool.run(of_outer_steps, str(tmp_path), compression, world_size=4)
    lines, _, kept = found[-1]
    each = np.mean([sent for _, sent, _ in found], axis=0).reshape(2, 3)
    assert (each[0] == each[1]).all()
    inside, whole = np.sort(each[0])[[0, -1]]
    assert whole > inside > 0
    assert sorted(each[0]) == [inside, inside, whole], "one bucket, so one turn"
    spread = (2 * inside + whole) / 3
    assert [line["gradient_wire_bytes"] for line in lines] == pytest.approx([spread] * 6)
    assert lines[-1]["gradient_wire_bits_per_element"] == pytest.approx(
        lines[0]["gradient_wire_bits_per_element"], rel=0.1
    )
    between = (whole - inside) / 3
    assert [line["outer_wire_bytes"] for line in lines] == pytest.approx([between] * 6)
    if "outer_delay" in compression:
        assert lines[2]["outer_norm"] > 0  # Weights have moved further since.
        return
    assert each[0][2] == whole
    for line, before, after in zip(lines[2::3], kept[:-1], kept[1:], strict=True):
        moved = sum(float((after[name] - before[name]).double().square().sum()) for name in after)
        assert line["outer_norm"] == pytest.approx(moved**0.5, rel=1e-4)
        assert line["outer_distance"] > 0


def of_a_trial(folder: str) -> tuple[Any, int, list[bool]]:
    """In a worker: how a job ends that is nothing but a trial, after how many steps, and its gathers."""
    from megatron_patch.megatron import metrics

    gpt = build(dtype="bf16", ddp={"grad_reduce_in_fp32": False})
    options = {"method": "loco", "start_step": 0, "trial": 48, "trial_only": True}
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**options))
    run = metrics.RunMetrics(Path(folder))
    run._model, steps, how, gathers = gpt.chunks, 0, None, []
    while how is None and steps < 100:
        steps += 1
        gathers.append(attachment_of(gpt.chunks[0]).session.choice.weights)
        try:
            gpt.step(steps)
        except SystemExit as end:
            how = end.code
    run.finish()
    return how, steps, gathers


def test_a_job_may_end_with_its_trial_whose_table_is_written(pool, tmp_path):
    """48 steps from the tenth on; weights are gathered as configured before."""
    for how, steps, gathers in pool.run(of_a_trial, str(tmp_path), world_size=4):
        assert (how, steps) == (0, 58)
        assert sum(gathers) == 24
        assert not any(gathers[:10])
    table = json.loads((tmp_path / "trial.json").read_text())
    assert (table["step"], table["steps"]) == (58, 48)
    stock, exact, low, both = table["rows"]
    assert both["choice"] == "4-bit gradients, exact gather"
    assert stock["megabytes"] > exact["megabytes"] > both["megabytes"] > 0
    assert stock["megabytes"] > low["megabytes"]
    assert all(row["low"] <= row["percent"] <= row["high"] for row in (exact, low, both))
    assert all(row["verdict"] and row["seconds"] > 0 for row in (exact, low, both))


def of_a_run_that_is_too_short() -> list[str]:
    """In a worker: what is said of a trial of 48 steps at the end of five."""
    from megatron_patch.megatron import metrics

    gpt = build(dtype="bf16", ddp={"grad_reduce_in_fp32": False})
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="none", trial=48))
    run, args = metrics.RunMetrics(), SimpleNamespace(global_batch_size=4, seq_length=8, log_interval=1)
    args.train_iters = 5
    with logged() as lines, mock.patch.object(metrics, "get_args", return_value=args):
        for step in range(1, 6):
            run._before_step({"model": gpt.chunks})
            gpt.step(step)
            run._log_step({"iteration": step, "loss_dict": {}, "grad_norm": None})
            run._tell(None)
    return [line for line in lines if "trial" in line]


def test_a_run_that_ends_before_its_trial_says_so(pool):
    *others, last = pool.run(of_a_run_that_is_too_short, world_size=2)
    assert not any(others)
    assert last == ["WARNING: megatron-loco: the run ended before its trial of 48 steps did"]
