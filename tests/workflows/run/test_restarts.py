"""A run that is killed and goes on: restarts by the launcher, `--resume`, folders that hold checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from workflows.engine_runs import MODEL, ROOT, SCRIPT, cpu_flags
from workflows.test_train import CONFIG, SMALL, children, command, megatron_loco

from megatron_patch.errors import UserError
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import checkpoints, launcher, run_folder
from megatron_patch.workflows.run.configuration import Launch

STEPS = 60


def records(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_a_finished_run_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [f"megatron.train_iters={STEPS}", "megatron.save_interval=10", "launch.max_restarts=2"]
    arguments = ["train", CONFIG, *SMALL, *settings, "--out", str(out)]
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while not checkpoints.latest_step(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(children(process.pid)[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    told = [line for line in err.splitlines() if "restart" in line]
    assert len(told) == 1
    assert told[0].startswith("llama_tiny: restart 1 of 2: rank 0 was killed by SIGKILL (see ")
    log = (out / "logs" / "rank-1.log").read_text()
    before, again = log.split("\nrestart 1 of 2: rank 0 was killed by SIGKILL")
    assert "loaded checkpoint" not in before
    loaded = int(again.partition("at iteration ")[2].split()[0]) if "at iteration " in again else 0
    assert loaded % 10 == 0
    assert [step for step, _ in records(out)] == list(range(1, STEPS + 1))
    assert not (out / "failures").exists()

    losses = records(out)
    summary = json.loads((out / "summary.json").read_text())
    done = megatron_loco(*arguments, "--resume")  # there is nothing left to do but to evaluate
    assert done.returncode == 0, done.stderr
    assert records(out) == losses
    again = json.loads((out / "summary.json").read_text())
    for key in ("steps", "train_loss", "valid_loss", "gradient_wire", "weight_wire", "compensation_bytes"):
        assert again[key] == summary[key]
    assert len(list((out / "tensorboard").iterdir())) == 3


def attempts_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "attempts").read_text().splitlines()]


def job_of(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> launcher.Job:
    """A job of two ranks; rank 1 ends as `ends` says, one entry for each attempt, rank 0 as told by it."""
    import torch  # noqa: F401  (once, and not in every forked rank)

    from megatron_patch.integration import run_script

    def rank_main(argv: list[str]) -> int:
        if os.environ["RANK"] == "0":
            while not (folder / "attempts").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            return 0
        with (folder / "attempts").open("a") as stream:
            stream.write(json.dumps({"port": os.environ["MASTER_PORT"]}) + "\n")
        os.write(1, b"hello\n")
        how = ends[len(attempts_of(folder)) - 1]
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            run_script._leave_failure(ValueError("bad data"), user=False)
            return 1
        return run_script._tell(UserError("bits: 3")) if how == "mistake" else 0

    monkeypatch.setattr(run_script, "main", rank_main)
    return launcher.Job(
        Launch(device="cpu", nproc_per_node=2, max_restarts=restarts), Path(SCRIPT), [], folder
    )


def run(job: launcher.Job) -> list[str]:
    said: list[str] = []
    launcher.start(job, tick=lambda: None, say=said.append)
    return said


def test_ranks_are_started_again_with_another_port_and_longer_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(job_of(tmp_path, 3, monkeypatch, ["killed", "raises", "done"]))
    assert [line.partition(" (see")[0] for line in said] == [
        "restart 1 of 3: rank 1 was killed by SIGKILL",
        "restart 2 of 3: rank 1 failed: ValueError: bad data",
    ]
    assert len({attempt["port"] for attempt in attempts_of(tmp_path)}) == 3
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert [line for line in log.splitlines() if line] == ["hello", said[0], "hello", said[1], "hello"]
    assert not (tmp_path / "failures").exists()


def test_restarts_run_out_and_the_last_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(launcher.RankFailed, match="rank 1 was killed by SIGKILL"):
        run(job_of(tmp_path, 1, monkeypatch, ["raises", "killed"]))
    assert len(attempts_of(tmp_path)) == 2


def test_a_mistake_of_the_users_and_an_interrupt_start_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, 5, monkeypatch, ["mistake", "killed"])
    with pytest.raises(UserError, match="bits: 3"):
        run(job)
    assert len(attempts_of(tmp_path)) == 1

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.start(job, tick=interrupt, say=print)
    assert len(attempts_of(tmp_path)) <= 2


def write_checkpoint(folder: Path, step: int) -> None:
    (checkpoints.checkpoints(folder) / f"iter_{step:07d}").mkdir(parents=True)
    (checkpoints.checkpoints(folder) / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize(
    ("held", "flags", "words"),
    [
        ("a run", ["--resume"], ["resume: ", "no checkpoint", "--overwrite", "megatron.save_interval"]),
        ("nothing", ["--resume"], ["resume: ", "no checkpoint"]),
        ("checkpoints", [], ["holds a run with checkpoints", "--resume", "from step 20"]),
        ("checkpoints", ["--overwrite"], ["--resume", "step 20", "remove ", "run/checkpoints"]),
        ("checkpoints", ["--overwrite", "--resume"], ["--resume", "not allowed with", "--overwrite"]),
        ("checkpoints", ["--resume", "megatron.finetune=true"], ["megatron.finetune: True", "leave it out"]),
    ],
)
def test_what_a_folder_holds_decides(
    held: str, flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    if held != "nothing":
        out.mkdir()
        (out / "config.yaml").write_text("kept")
    if held == "checkpoints":
        write_checkpoint(out, 20)
    assert main(["train", CONFIG, *flags, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert held == "nothing" or (out / "config.yaml").read_text() == "kept"


def test_compare_overwrites_no_checkpoints_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "loco", 20)
    assert main(["compare", CONFIG, "--overwrite", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'loco'} holds a run with checkpoints" in capsys.readouterr().err


def test_what_resume_keeps(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20)
    kept = ["metrics.jsonl", "logs/rank-0.log", "tensorboard/events"]
    for name in [*kept, "failures/rank-0.json", "summary.json"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    run_folder.claim_folder(tmp_path, overwrite=False, resume=True)
    for name in kept:
        assert (tmp_path / name).read_text() == name
    assert not (tmp_path / "failures").exists()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.slow
def test_torchrun_starts_ranks_again_with_the_same_losses(tmp_path: Path) -> None:
    def job(name: str, restarts: int) -> launcher.Job:
        folder = tmp_path / name
        flags = [
            *(*MODEL, *cpu_flags(), "--train-iters", "60", "--save-interval", "5"),
            *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
            *("--overlap-grad-reduce", "--ddp-bucket-size", "20000", "--untie-embeddings-and-output-weights"),
            *("--compression-device", "cpu", "--compression-output", str(folder)),
        ]
        run_script = Launch(device="cuda", nproc_per_node=2, max_restarts=restarts)  # cuda: not forked
        return launcher.Job(run_script, Path(SCRIPT), flags, folder)

    run(job("undisturbed", 0))
    killed = job("killed", 2)
    ranks: list[int] = []

    def kill_once() -> None:
        if not ranks and (checkpoints.latest_step(killed.folder) or 0) >= 10:
            torchrun = int(children(os.getpid())[-1])
            ranks.extend(int(pid) for pid in children(torchrun))
            os.kill(ranks[1], signal.SIGKILL)

    said: list[str] = []
    launcher.start(killed, kill_once, said.append)
    assert len(said) == 1
    assert said[0].startswith("restart 1 of 2: rank 1 was killed by SIGKILL")
    assert records(killed.folder) == records(tmp_path / "undisturbed")
    assert len(list(killed.logs.glob("*/attempt_*"))) == 2
