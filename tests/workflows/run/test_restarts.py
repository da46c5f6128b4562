"""A run that is killed and goes on: restarts by the launcher, `--resume`, folders that hold checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from worker_pool import in_warm_process
from workflows.engine_runs import MODEL, ROOT, SCRIPT, cpu_flags
from workflows.test_train import (
    CONFIG,
    SMALL,
    alive,
    command,
    megatron_loco,
    ranks_of,
    run_command,
    warm_megatron_loco,
)

from megatron_patch.errors import UserError
from megatron_patch.workflows import train
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import launcher, run_folder
from megatron_patch.workflows.run.job import Job, Launch
from megatron_patch.workflows.run.run_folder import latest_step, only_one

STEPS = 60
FILES = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json")
WIRE = {"bits_per_element": 4.1, "bytes_per_step": 10}
SUMMARY = {
    **{
        "steps": 5,
        "world_size": 2,
        "valid_loss": 1.0,
        "train_loss": 1.0,
        "device": "cpu",
        "versions": {"a": "1"},
    },
    **{"step_seconds": {"median": 0.1}, "compensation_bytes": 5, "gradient_wire": WIRE, "weight_wire": WIRE},
}


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
    while not latest_step(out / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
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


def job_of(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> Job:
    """A job of two ranks; rank 1 ends as `ends` says, one entry for each attempt, rank 0 as told by it."""
    import torch  # noqa: F401  (once, and not in every forked rank)

    from megatron_patch.megatron import run_script

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
    return Job(Launch(device="cpu", nproc_per_node=2, max_restarts=restarts), Path(SCRIPT), [], folder)


def run(job: Job) -> list[str]:
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


def test_a_rank_that_ends_by_sigsegv_leaves_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "crashes.py"
    script.write_text("import os\n\ndef crash():\n    os.kill(os.getpid(), 11)\n\ncrash()\n")
    rank = [sys.executable, "-m", "megatron_patch.launch", str(script), "--compression-device", "cpu"]
    ended = subprocess.run(rank, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGSEGV
    assert re.search(r'crashes.py", line 4 in crash', ended.stderr)


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
    (folder / "checkpoints" / f"iter_{step:07d}").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize(
    ("held", "flags", "words"),
    [
        ("a run", ["--resume"], ["resume: ", "no checkpoint", "--overwrite", "megatron.save_interval"]),
        ("nothing", ["--resume"], ["resume: ", "no checkpoint"]),
        ("checkpoints", [], ["run/checkpoints holds a run's checkpoints", "--resume", "from step 20"]),
        ("checkpoints", ["--overwrite"], ["--resume", "step 20", "remove them", "run/checkpoints"]),
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
    assert f"{tmp_path / 'loco/checkpoints'} holds a run's checkpoints" in capsys.readouterr().err


def record_of_a_run(folder: Path) -> None:
    for name in (*FILES, "logs/rank-0.log", "tensorboard/events", "failures/rank-1.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"old {name}")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below `folder`, without the lock's."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_run_keeps_of_the_one_before(tmp_path: Path, resume: bool) -> None:
    record_of_a_run(tmp_path)
    write_checkpoint(tmp_path, 20)
    run_folder.begin(tmp_path, {"config.yaml": "new", "command.txt": "new"}, resume=resume)
    found = contents(tmp_path)
    old = {name for name, text in found.items() if text == f"old {name}".encode()}
    assert old == ({"logs/rank-0.log", "tensorboard/events", "metrics.jsonl"} if resume else set())
    assert found["config.yaml"] == found["command.txt"] == b"new"
    assert not {"summary.json", "failures/rank-1.json"} & found.keys()
    assert latest_step(tmp_path / "checkpoints") == 20


def train_on_a_full_disk(arguments: tuple[str, ...], folder: Path) -> None:
    """In a process of its own: there is room for one file."""
    room = iter([True, False])

    def full(path: Path, text: str) -> None:
        if not next(room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_text(text)

    run_folder.write_whole = full
    run_command(arguments, folder, False)


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("train", CONFIG, *SMALL, "--out", str(out))
    in_warm_process(train_on_a_full_disk, arguments, tmp_path, log=tmp_path / "log", timeout=200)
    assert (tmp_path / "status").read_text() == "2"
    assert (tmp_path / "stderr").read_text().splitlines()[-1] == (
        f"megatron-loco: error: out: {out} cannot be written: No space left on device"
    )


def hold(folder: Path, held: Any, leave: Any) -> None:
    with only_one(folder, "train"):
        held.set()
        leave.wait()


@pytest.mark.parametrize("flags", [["--resume"], ["--overwrite"], []])
def test_a_second_run_in_a_folder_is_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, 20)
    record_of_a_run(tmp_path)
    (tmp_path / ".lock").touch()
    before = contents(tmp_path)
    context = multiprocessing.get_context("fork")
    held, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, held, leave))
    other.start()
    try:
        assert held.wait(60)
        assert main(["train", CONFIG, *flags, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"megatron-loco: error: out: another `train` is at work in {tmp_path}\n"
        )
        assert contents(tmp_path) == before
        with pytest.raises(UserError, match="at work"), only_one(tmp_path, "train", wait=0.5):
            pass
        os.kill(other.pid, signal.SIGKILL)  # the lock goes with its process
        with only_one(tmp_path, "train", wait=60), only_one(tmp_path, "train"):
            pass
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("flags", [["--resume-or-start"], ["--overwrite"], []])
def test_a_second_run_that_saves_where_another_one_does_is_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_DYING_SECONDS", 0)
    saves, out = tmp_path / "saves", tmp_path / "out"
    context = multiprocessing.get_context("fork")
    held, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(saves, held, leave))
    other.start()
    try:
        assert held.wait(60)
        asked = ["train", CONFIG, *flags, f"megatron.save={saves}", "megatron.save_interval=5"]
        assert main([*asked, "--out", str(out)]) == 2
        assert capsys.readouterr().err == (
            f"megatron-loco: error: megatron.save: another `train` is at work in {saves}\n"
        )
        assert not out.exists()
    finally:
        other.kill()
        other.join()


def test_a_file_system_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with only_one(tmp_path, "train"):
        assert "has no locks" in capsys.readouterr().err


SAVED_ELSEWHERE = ["megatron.save=elsewhere", "megatron.save_interval=5"]


@pytest.mark.parametrize(
    ("saved", "flags", "words"),
    [
        (None, [*SAVED_ELSEWHERE, "--resume"], ["resume: elsewhere holds no checkpoint"]),
        (20, SAVED_ELSEWHERE, ["elsewhere holds a run's checkpoints", "--resume", "step 20"]),
        (20, [*SAVED_ELSEWHERE, "--overwrite"], ["elsewhere holds a run's checkpoints"]),
        (20, [*SAVED_ELSEWHERE, "--resume", "megatron.load=other"], ["megatron.load: 'other'", "of its own"]),
        (None, [*SAVED_ELSEWHERE, "launch.max_restarts=1", "megatron.load=other"], ["pretrained_checkpoint"]),
        (None, ["--resume-or-start"], ["megatron.save_interval: not set", "step 0"]),
        (None, ["--resume-or-start", "--resume"], ["not allowed with"]),
        (None, ["--resume-or-start", *SAVED_ELSEWHERE, "megatron.load=other"], ["pretrained_checkpoint"]),
        (None, ["--resume-or-start", *SAVED_ELSEWHERE, "megatron.finetune=true"], ["megatron.finetune"]),
    ],
)
def test_checkpoints_are_looked_for_where_they_are_saved(
    saved: int | None,
    flags: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if saved:
        write_checkpoint(tmp_path, saved)
        (tmp_path / "checkpoints").rename("elsewhere")
    assert main(["train", CONFIG, *flags, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "run").exists()


def test_megatron_saves_and_loads_in_one_place(tmp_path: Path) -> None:
    saved = tmp_path / "elsewhere"
    settings = [*SMALL, f"megatron.save={saved}", "megatron.save_interval=5", "--dry-run"]
    for number, load in enumerate([[], [f"megatron.load={saved}"]]):
        arguments = ("train", CONFIG, *settings, *load)
        done = warm_megatron_loco(*arguments, folder=tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        words = done.stdout.split()
        assert [words[words.index(flag) + 1] for flag in ("--save", "--load")] == [str(saved)] * 2, (
            done.stderr
        )


@pytest.mark.parametrize(
    "command", [["compare", CONFIG], ["ablate", "bits"], ["ablate", "bits", "--task", "0"]], ids=str
)
def test_several_runs_do_not_save_in_one_place(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *SAVED_ELSEWHERE, "--out", str(tmp_path / "out")]) == 2
    assert "megatron.save: 'elsewhere': several runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("state", "how"), [("checkpoint", "resume"), ("stopped", "overwrite"), ("new", "")])
def test_resume_or_start_does_what_the_folder_asks_for(
    state: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    if state != "new":
        out.mkdir()
        (out / "config.yaml").write_text("old")
    if state == "checkpoint":
        write_checkpoint(out, 20)
    asked: list[tuple[bool, bool]] = []

    def execute(prepared: object, label: str, overwrite: bool, resume: bool) -> dict[str, None]:
        asked.append((overwrite, resume))
        return {"valid_loss": None, "train_loss": None}

    monkeypatch.setattr(train, "execute", execute)
    monkeypatch.setattr(train, "prepare_run", lambda *_: SimpleNamespace(args=None))
    settings = [*SMALL, "megatron.save_interval=5", "--resume-or-start", "--out", str(out)]
    assert main(["train", CONFIG, *settings]) == 0
    (found,) = asked
    assert found[1] == (how == "resume")
    assert found[0] or how != "overwrite"


def test_resume_or_start_keeps_a_run_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("old")
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    arguments = ["train", CONFIG, *SMALL, "megatron.save_interval=5", "--resume-or-start"]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_resume_that_the_ranks_refuse_is_one_line_and_may_be_asked_for_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [*SMALL, "megatron.save_interval=2", "compression.strict_load=true", "launch.max_restarts=3"]
    arguments = ("train", CONFIG, *settings, "--out", str(out))
    done = warm_megatron_loco(*arguments, "megatron.train_iters=2", folder=tmp_path / "a", trains=True)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (out / "checkpoints").glob("iter_*")
    metadata = FileSystemReader(checkpoint).read_metadata()
    del metadata.state_dict_metadata["megatron_loco.rank_1"]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    more = ("megatron.train_iters=4", "megatron.lr=2e-3", "megatron.override_opt_param_scheduler=true")
    for _ in range(2):
        done = warm_megatron_loco(*arguments, *more, "--resume", folder=tmp_path / f"{_}", trains=True)
        assert done.returncode == 2, done.stderr
        assert "error states of rank 1 are missing" in done.stderr.splitlines()[-1]
        assert "restart" not in done.stderr


KILLED_ONCE = """
import os, pathlib, runpy, signal, sys, threading, time

saved = pathlib.Path(sys.argv[sys.argv.index("--save") + 1]) / "latest_checkpointed_iteration.txt"

def die():
    while not saved.exists() or int(saved.read_text() or 0) < 10:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=die, daemon=True).start()
runpy.run_path("SCRIPT", run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_again_with_the_same_losses(tmp_path: Path) -> None:
    """A thread kills rank 1 from within: a process that watches from outside may wake up when all is over."""
    script = tmp_path / "killed_once.py"
    script.write_text(KILLED_ONCE.replace("SCRIPT", SCRIPT))

    def job(name: str, restarts: int) -> Job:
        folder = tmp_path / name
        flags = [
            *(*MODEL, *cpu_flags(), "--train-iters", "60", "--save-interval", "5"),
            *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
            *("--overlap-grad-reduce", "--ddp-bucket-size", "20000", "--untie-embeddings-and-output-weights"),
            *("--compression-device", "cpu", "--compression-output", str(folder)),
        ]
        run_script = Launch(device="cuda", nproc_per_node=2, max_restarts=restarts)  # cuda: not forked
        return Job(run_script, script if restarts else Path(SCRIPT), flags, folder)

    run(job("undisturbed", 0))
    killed = job("killed", 2)
    said: list[str] = []
    launcher.start(killed, lambda: None, said.append)
    assert len(said) == 1
    assert said[0].startswith("restart 1 of 2: rank 1 was killed by SIGKILL")
    assert records(killed.folder) == records(tmp_path / "undisturbed")
    assert len(list(killed.logs.glob("*/attempt_*"))) == 2


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_torchrun_behind(tmp_path: Path) -> None:
    """Its lock on the folder is gone: ranks that trained on would write beside the next run's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {os.getppid()}')\n"
        "time.sleep(1000)\n"
    )
    told = tmp_path / "pids"
    job = Job(Launch(device="cuda", nproc_per_node=1), script, [str(told)], tmp_path / "run")
    process = multiprocessing.get_context("fork").Process(target=run, args=(job,))
    process.start()
    until(lambda: told.exists() and len(told.read_text().split()) == 2)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for pid in map(int, told.read_text().split()):
        until(lambda pid=pid: not alive(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
