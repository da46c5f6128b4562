"""`megatron-loco ablate` as a user runs it: killed, started again, a cell that fails, a job array's task."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from workflows.engine_runs import ROOT
from workflows.test_train import SMALL, command, until, warm_megatron_loco

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


def test_interrupted_and_started_again_it_makes_what_is_left_and_reports_what_failed(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no such luck')\n")
    cells = f"  - {{compression.method: naive}}\n  - {{launch.script: {script}}}\n"
    broken = f"script={str(script).replace('/', '_')}"
    arguments, out = define(tmp_path, "[1]", cells), tmp_path / "out"
    done = warm_megatron_loco(*arguments, folder=tmp_path / "first", trains=True)
    assert done.returncode == 1, done.stderr  # one run of three failed; the others were made
    assert f"{broken} seed 1: failed: rank " in done.stderr
    assert "RuntimeError: no such luck" in (out / broken / "seed-1/failed.txt").read_text()
    assert "1 of 1" in done.stdout
    lines = (out / "results.csv").read_text().splitlines()
    assert [line[:20] for line in lines[1:3]] == ["method=none,1,none,,", "method=naive,1,naive"]
    assert sum(",failed," in line for line in lines) == 1
    for name in ("ablation.md", "differences.png", "curves.png"):
        assert (out / name).stat().st_size > 0

    before = made(out)
    for path in (out / "method=naive/seed-1/summary.json", out / "results.csv"):  # as a kill leaves it
        path.unlink()
    again = warm_megatron_loco(*arguments, folder=tmp_path / "second", trains=True)
    assert again.returncode == 1, "what failed is not made again"
    changed = {name for name, when in made(out).items() if when != before[name]}
    assert changed == {"method=naive/seed-1"}, "what was done is not run again"
    assert (out / "results.csv").read_text().splitlines() == lines


def test_cells_with_a_codec_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = "  - {compression.codec: fp8, compression.bits: 8}\n"
    arguments = [*define(tmp_path, "[1]", cells), "--dry-run"]
    imported = (*arguments, "--import", str(ROOT / "pretrain_scripts/own_codec.py"))
    listed = warm_megatron_loco(*imported, folder=tmp_path / "listed")
    assert listed.returncode == 0, listed.stderr
    assert "codec=fp8,bits=8 seed 1" in listed.stdout
    refused = warm_megatron_loco(*arguments, folder=tmp_path / "refused")
    assert refused.returncode == 2
    assert "cell codec=fp8,bits=8: compression.codec: 'fp8'" in refused.stderr
    assert "--import FILE.py" in refused.stderr


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_a_task_makes_one_run(tmp_path: Path) -> None:
    arguments, out = define(tmp_path, "[1]", "  - {compression.method: loco}\n"), tmp_path / "out"
    endless = [*arguments, "megatron.train_iters=100000"]
    process = start(endless)
    until(lambda: (out / "method=none/seed-1/metrics.jsonl").exists(), process)
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
