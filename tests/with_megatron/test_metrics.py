"""metrics.jsonl of a run that goes on from a checkpoint: every step once. Tokens of batches that change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


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
    from types import SimpleNamespace
    from unittest import mock

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
