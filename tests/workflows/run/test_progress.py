"""The progress line of a run that begins at its first step, goes on, and is started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_patch.workflows.run import progress
from megatron_patch.workflows.run.progress import StepProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def log(path: Path, steps: range, begin: bool = False) -> None:
    """Steps behind the others; or in a new file in the place of the old one, as metrics.py begins anew."""
    partial = path.with_suffix(".partial") if begin else path
    with partial.open("a") as stream:
        stream.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)
    partial.replace(path)


def test_a_resumed_run_is_shown_where_it_stands(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, range(1, 48), begin=True)  # died at step 47, goes on from 40
    with StepProgress("run", 100, path, done=40) as shown:
        shown.tick()
        assert capsys.readouterr().err == ""  # the steps of the attempt that died are not its own
        log(path, range(1, 42), begin=True)
        shown.tick()
        clock[0] += 20
        log(path, range(42, 52))
        shown.tick()
        assert capsys.readouterr().err == "run: step 51/100  loss 1.000  2.00 s/step  1:38 left\n"


def test_a_restart_is_a_line_of_its_own_and_begins_the_measurement_anew(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with StepProgress("run", 100, path) as shown:
        log(path, range(1, 2), begin=True)
        shown.tick()
        clock[0] += 10
        log(path, range(2, 12))
        shown.tick()
        shown.say("restart 1 of 3: rank 2 raised [/gloo/pair.cc:545] timed out")
        clock[0] += 60  # starting again
        shown.tick()
        log(path, range(1, 10), begin=True)
        shown.tick()
        clock[0] += 36
        log(path, range(10, 28))
        shown.tick()
    assert capsys.readouterr().err.splitlines() == [
        "run: step 11/100  loss 1.000  1.00 s/step  1:29 left",
        "run: restart 1 of 3: rank 2 raised [/gloo/pair.cc:545] timed out",
        "run: step 27/100  loss 1.000  2.00 s/step  2:26 left",
    ]
