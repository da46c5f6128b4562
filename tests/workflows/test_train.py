"""`megatron-loco train` as a user runs it, in a process of its own: results, mistakes, and ranks that die."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_pool import in_warm_process
from workflows.engine_runs import ROOT, SCRIPT, prepare

from megatron_patch.workflows import cli, compare, train
from megatron_patch.workflows.run import launcher
from megatron_patch.workflows.run.job import Job, Launch

SMALL = [
    "megatron.num_layers=1",
    "megatron.hidden_size=32",
    "megatron.seq_length=32",
    "megatron.max_position_embeddings=32",
    "megatron.global_batch_size=8",
    "megatron.micro_batch_size=2",
    "megatron.lr_warmup_iters=1",
    "megatron.eval_iters=1",
    "megatron.log_interval=1",
    "megatron.mock_data=true",
    "megatron.tokenizer_type=NullTokenizer",
    "megatron.vocab_size=257",
    "data.path=null",
    "data.source=null",
    "launch.nproc_per_node=2",
]
CONFIG = str(ROOT / "configs/models/llama_tiny.yaml")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatron_patch.workflows.cli", *arguments]


def run_command(arguments: tuple[str, ...], folder: Path, trains: bool) -> None:
    """In a process of its own: the command, its output and exit status in files."""
    if trains:
        prepare()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    status = cli.main(list(arguments))
    (folder / "status").write_text(str(status))


def megatron_loco(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


def warm_megatron_loco(
    *arguments: str, folder: Path, trains: bool = False
) -> subprocess.CompletedProcess[str]:
    """The same in a process that has imported Megatron already, most of a short command's time.

    Where it `trains`, its ranks find done what engine_runs.prepare does for them.
    """
    folder.mkdir()
    in_warm_process(run_command, arguments, folder, trains, log=folder / "log", timeout=200)
    status, out, err = ((folder / name).read_text() for name in ("status", "stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, int(status), out, err)


def test_an_interrupted_comparison_goes_on_and_makes_nothing_twice(tmp_path: Path) -> None:
    """It leaves a table, a picture and a folder for each method, whole or resumed."""
    out = tmp_path / "quick"
    arguments = ("compare", CONFIG, *SMALL, "megatron.train_iters=4", "--out", str(out))
    whole = warm_megatron_loco(*arguments, folder=tmp_path / "whole", trains=True)
    assert whole.returncode == 0, whole.stderr
    assert "none" in whole.stdout
    assert "loss" in whole.stderr  # progress
    results = [out / name for name in ("comparison.json", "comparison.md", "comparison.png")]
    runs = json.loads(results[0].read_text())["runs"]
    assert list(runs) == ["none", "loco"]
    assert runs["loco"]["gradient_wire"]["bits_per_element"] < 4.7
    assert results[1].read_text().startswith("| method | valid. loss |")
    for name in ("config.yaml", "command.txt", "metrics.jsonl", "summary.json"):
        assert (out / "loco" / name).stat().st_size > 0
    shown = (out / "loco" / "command.txt").read_text()
    assert "torchrun" in shown
    assert "--compression-method loco --compression-bits 4" in shown

    for path in (*results, out / "loco/summary.json"):  # as a kill during the second run would leave it
        path.unlink()
    before = (out / "none/summary.json").stat().st_mtime_ns
    resumed = warm_megatron_loco(*arguments, "--resume", folder=tmp_path / "resumed", trains=True)
    assert resumed.returncode == 0, resumed.stderr
    assert (out / "none/summary.json").stat().st_mtime_ns == before, "a run that is done was made again"
    again = json.loads(results[0].read_text())["runs"]
    losses = [[one[name]["valid_loss"] for name in ("none", "loco")] for one in (runs, again)]
    assert losses[0] == losses[1]
    assert [row["step"] for row in map(json.loads, (out / "loco/metrics.jsonl").open())] == [1, 2, 3, 4]
    assert results[2].read_bytes().startswith(b"\x89PNG")


def test_a_codec_of_a_file_of_ones_own_trains_and_is_resumed(tmp_path: Path) -> None:
    """Ranks and a resumed run know it from the run's configuration, which the report shows."""
    file, out = tmp_path / "my_codec.py", tmp_path / "run"
    file.write_text((ROOT / "pretrain_scripts/own_codec.py").read_text())
    options = ("compression.codec=fp8", "compression.bits=8", "compression.start_step=0")
    steps = ("megatron.train_iters=4", "megatron.save_interval=2", "megatron.exit_interval=2")
    arguments = ("train", CONFIG, *SMALL, *options, *steps, "--import", str(file), "--out", str(out))
    first = warm_megatron_loco(*arguments, folder=tmp_path / "first", trains=True)
    assert (out / "checkpoints/iter_0000002").is_dir(), first.stderr
    assert f"--compression-import {file}" in (out / "command.txt").read_text()
    again = ("train", str(out / "config.yaml"), "megatron.exit_interval=null", "--resume", "--out", str(out))
    second = warm_megatron_loco(*again, folder=tmp_path / "second", trains=True)
    assert second.returncode == 0, second.stderr
    found = json.loads((out / "summary.json").read_text())
    assert found["steps"] == 4
    assert 8.125 < found["gradient_wire"]["bits_per_element"] < 9
    page = tmp_path / "page.html"
    assert cli.main(["report", str(out), "--out", str(page)]) == 0
    assert str(file) in page.read_text()


def test_a_run_that_ends_with_its_trial_prints_the_table(tmp_path: Path) -> None:
    trial = ("compression.method=none", "compression.trial=48", "compression.trial_only=true")
    steps = ("megatron.bf16=true", "megatron.train_iters=100", "megatron.lr_warmup_iters=1")
    arguments = ("train", CONFIG, "--out", str(tmp_path / "run"), *SMALL, *trial, *steps)
    ended = warm_megatron_loco(*arguments, folder=tmp_path / "command", trains=True)
    assert ended.returncode == 0, ended.stderr
    said, stock, exact = ended.stdout.splitlines()[-3:]
    assert re.fullmatch(rf"no validation loss, training loss \d\.\d{{4}}; see {tmp_path / 'run'}", said)
    assert re.fullmatch(r"  stock, fp32 gradients +[\d.]+ s a step +[\d.]+ MB a rank", stock)
    assert re.match(r"  exact gather +[\d.]+ s a step +[\d.]+ MB a rank +[+-][\d.]+ % \(.*\)  \w", exact)


def test_a_stopped_comparison_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise launcher.Stopped("stopped by SIGINT")

    monkeypatch.setattr(compare, "prepare_run", lambda run, folder: (run, folder))
    monkeypatch.setattr(train, "execute", stop)
    assert cli.main(["compare", CONFIG, "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "the same command with --resume resumes this one" in err
    assert err.splitlines()[-1] == "megatron-loco: error: stopped by SIGINT"
    assert cli.main(["compare", CONFIG, "--out", str(tmp_path), "--overwrite"]) == 1
    assert "the same command with --resume in place of --overwrite resumes" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_exit_status_2_before_any_rank_starts(tmp_path: Path) -> None:
    """The rules have tests of their own, of `configuration.load` and `megatron_flags.check`."""
    arguments = ("train", CONFIG, *SMALL, "megatron.num_attention_heads=7", "--out", str(tmp_path / "run"))
    done = warm_megatron_loco(*arguments, folder=tmp_path / "command")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron-loco: error: megatron")
    assert not (tmp_path / "run").exists()


def failed(rank: int, when: float, error: str, user: bool = False) -> dict[str, object]:
    return {"rank": rank, "time": when, "error": error, "traceback": f"Traceback\n{error}", "user": user}


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:5000"


@pytest.mark.parametrize(
    ("records", "ended", "words"),
    [
        # The cause, although its peers noticed earlier that it was gone.
        ([failed(0, 1.0, LOST), failed(1, 2.0, "ValueError: a")], {0: 1, 1: 1}, "rank 1 failed: Value"),
        ([failed(0, 2.0, "KeyError: b"), failed(2, 1.0, "KeyError: a")], {0: 1, 2: 1}, "rank 2 failed: Key"),
        ([failed(0, 1.0, LOST)], {0: 1, 3: -9}, "rank 3 was killed by SIGKILL"),
        ([failed(1, 1.0, "bits: 3", user=True)], {1: 2}, "bits: 3"),
        ([], {1: 7}, "rank 1 ended with exit status 7"),
    ],
)
def test_the_first_cause_is_named(
    records: list[dict[str, object]], ended: dict[int, int], words: str, tmp_path: Path
) -> None:
    job = Job(Launch(device="cpu", nproc_per_node=4), Path(SCRIPT), [], tmp_path)
    job.failures.mkdir()
    for record in records:
        (job.failures / f"rank-{record['rank']}.json").write_text(json.dumps(record))
    assert str(launcher.first_failure(job, ended)).startswith(words)


def test_a_rank_that_could_not_say_why_on_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    job = Job(Launch(device="cpu", nproc_per_node=4), Path(SCRIPT), [], tmp_path)
    job.logs.mkdir()
    (job.logs / "rank-1.log").write_text("Traceback\nof a hundred lines")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert str(launcher.first_failure(job, {1: 1})) == (
        f"rank 1 ended with exit status 1: no space is left on the disk of {tmp_path}"
    )


def ranks_of(launcher: int) -> list[int]:
    """Their processes are children of the agent's, which is a child of the launcher's."""
    return [int(rank) for agent in children(launcher) for rank in children(int(agent))]


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def records(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every logged step of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def until(happened: Callable[[], bool], process: Any = None, told: Callable[[], str] = str) -> None:
    """Wait, ten minutes at most; a process must not end meanwhile. `told` is what a failure shows."""
    deadline = time.monotonic() + 600
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)
