"""`megatron-loco ablate` as a user runs it: killed, started again, a cell that fails, a job array's task."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workflows.engine_runs import ROOT
from workflows.test_train import SMALL, alive, command, megatron_loco, ranks_of, warm_megatron_loco

SETTINGS = dict(item.split("=", 1) for item in SMALL)
STEPS = 4


def define(folder: Path, seeds: str, cells: str) -> list[str]:
    """A definition of runs that take a second or two; returns the command's arguments."""
    path = folder / "trial.yaml"
    overrides = "".join(f"  {key}: {value}\n" for key, value in SETTINGS.items())
    path.write_text(
        "base: configs/models/llama_tiny.yaml\n"
        f"seeds: {seeds}\n"
        f"overrides:\n{overrides}  megatron.train_iters: {STEPS}\n"
        "baseline: {compression.method: none}\n"
        f"cells:\n{cells}"
    )
    return ["ablate", str(path), "--out", str(folder / "out")]


def made(out: Path) -> dict[str, int]:
    """The runs that are done, and when their summaries were written (ns)."""
    return {
        str(path.parent.relative_to(out)): path.stat().st_mtime_ns for path in out.glob("*/*/summary.json")
    }


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_and_started_again_it_makes_what_is_left_and_reports_what_failed(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no such luck')\n")
    cells = f"  - {{compression.method: naive}}\n  - {{launch.script: {script}}}\n"
    broken = f"script={str(script).replace('/', '_')}"
    arguments, out = define(tmp_path, "[1, 2]", cells), tmp_path / "out"
    process = start(arguments)
    wait(process, lambda: len(made(out)) == 1 and (out / "method=naive/seed-1/metrics.jsonl").exists())
    ranks = ranks_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    before = made(out)
    assert before.keys() >= {"method=none/seed-1"}  # and the second run, where it was faster than the kill

    done = warm_megatron_loco(*arguments, folder=tmp_path / "second")
    assert done.returncode == 1, done.stderr  # two runs of six failed; the others were made
    after = made(out)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before, "what was done is not run again"
    assert f"{broken} seed 1: failed: rank " in done.stderr
    assert "RuntimeError: no such luck" in (out / broken / "seed-1/failed.txt").read_text()
    assert str(out / broken / "seed-2/failed.txt") in done.stderr
    lines = (out / "results.csv").read_text().splitlines()
    assert [line[:20] for line in lines[1:3]] == ["method=none,1,none,,", "method=naive,1,naive"]
    assert sum(",failed," in line for line in lines) == 2
    assert "method=naive" in done.stdout
    assert "2 of 2" in done.stdout
    for name in ("ablation.md", "differences.png", "curves.png"):
        assert (out / name).stat().st_size > 0

    again = warm_megatron_loco(*arguments, folder=tmp_path / "third")  # nothing is left, also of what failed
    assert again.returncode == 1
    assert made(out) == after
    assert (out / "results.csv").read_text().splitlines() == lines


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_a_task_makes_one_run(tmp_path: Path) -> None:
    arguments, out = define(tmp_path, "[1]", "  - {compression.method: loco}\n"), tmp_path / "out"
    endless = [*arguments, "megatron.train_iters=100000"]
    process = start(endless)
    wait(process, lambda: (out / "method=none/seed-1/metrics.jsonl").exists())
    blocked = warm_megatron_loco(*endless, folder=tmp_path / "blocked")
    assert blocked.returncode == 2
    assert "another `ablate` is at work" in blocked.stderr
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "the same command continues where this one was stopped" in err
    assert not made(out)

    flags = ("--task", "1", "megatron.exit_interval=2")
    early = warm_megatron_loco(*arguments, *flags, folder=tmp_path / "early")
    assert early.returncode == 1
    assert "failed: ended after step 2 of 4" in early.stderr
    task = warm_megatron_loco(*arguments, "--task", "1", "--overwrite", folder=tmp_path / "task")
    assert task.returncode == 0, task.stderr
    assert "method=loco/seed-1" in made(out)
    assert not (out / "results.csv").exists(), "tasks do not write one another's file"
    assert not (out / "method=loco/seed-1/data-cache").exists()


@pytest.mark.slow
def test_killed_again_and_again_it_leaves_what_an_undisturbed_one_leaves(tmp_path: Path) -> None:
    """SIGKILL at random moments, checkpoints included: the same files, and no run is made twice."""
    cells = "  - {compression.method: loco, megatron.save_interval: 2}\n  - {compression.method: naive}\n"
    for name in ("left_alone", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = megatron_loco(*define(tmp_path / "left_alone", "[1, 2, 3]", cells))
    assert undisturbed.returncode == 0, undisturbed.stderr

    arguments, out = define(tmp_path / "killed", "[1, 2, 3]", cells), tmp_path / "killed/out"
    rng = random.Random(11)
    known: dict[str, int] = {}
    kills = 0
    while True:
        process = start(arguments)
        begun = time.monotonic()
        seconds = 10 + rng.uniform(0, 12)
        while process.poll() is None and time.monotonic() < begun + seconds:
            time.sleep(0.05)
        ended = process.poll() is not None
        process.kill()  # nothing, if it has ended
        process.communicate()
        time.sleep(0.5)
        now = made(out)
        assert {name: now[name] for name in known} == known, "a run that was done was made again"
        known = now
        if ended:
            break
        kills += 1
        assert kills < 60
    assert process.returncode == 0
    assert kills >= 2
    for name in ("results.csv", "ablation.md"):
        assert (out / name).read_bytes() == (tmp_path / "left_alone/out" / name).read_bytes()
    for path in sorted(out.glob("*/*/metrics.jsonl")):
        other = tmp_path / "left_alone/out" / path.relative_to(out)
        losses = [
            [json.loads(line)["loss"] for line in one.read_text().splitlines()] for one in (path, other)
        ]
        assert losses[0] == losses[1]
