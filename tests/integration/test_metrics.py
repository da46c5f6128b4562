"""metrics.jsonl of a run that goes on from a checkpoint: every step once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def continue_at(path: str, step: int) -> None:
    """In a worker, which has imported Megatron: what the writer does before its first line."""
    from megatron_patch.integration.metrics import _continue

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
