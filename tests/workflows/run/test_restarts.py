"""A run that is killed or asked to stop, and goes on: restarts, `--resume`, folders that hold checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint import FileSystemReader
from workflows.engine_runs import MODEL, SCRIPT, cpu_flags
from workflows.test_train import CONFIG, SMALL, alive, ranks_of, records, until, warm_megatron_loco

from megatron_patch.errors import UserError
from megatron_patch.workflows import train
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import launcher, run_folder
from megatron_patch.workflows.run.job import Job, Launch
from megatron_patch.workflows.run.run_folder import latest_step, only_one

SUMMARY = {
    **{"steps": 5, "world_size": 2, "valid_loss": 1.0, "train_loss": 1.0, "device": "cpu"},
    **{"step_seconds": {"median": 0.1}, "compensation_bytes": 5, "versions": {"a": "1"}},
    **{name: {"bits_per_element": 4.1, "bytes_per_step": 10} for name in ("gradient_wire", "weight_wire")},
}


def attempts_of(folder: Path) -> list[dict[str, str]]:
    path = folder / "attempts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def job_of(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> Job:
    """A job of two ranks; rank 1 ends as `ends` says, one entry for each attempt, rank 0 once all is done."""
    import torch  # noqa: F401  (once, and not in every forked rank)

    from megatron_patch.megatron import run_script

    def rank_main(argv: list[str]) -> int:
        if os.environ["RANK"] == "0":
            (folder / "rank-0").write_text(str(os.getpid()))
            while not attempts_of(folder) or ends[len(attempts_of(folder)) - 1] != "done":
                time.sleep(0.01)
            return 0
        until(lambda: (folder / "rank-0").exists())
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


def test_restarts_run_out_the_last_failure_is_told_and_no_rank_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(launcher.RankFailed, match="rank 1 was killed by SIGKILL"):
        run(job_of(tmp_path, 1, monkeypatch, ["raises", "killed"]))
    assert len(attempts_of(tmp_path)) == 2
    assert not alive(int((tmp_path / "rank-0").read_text()))


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
    job = job_of(tmp_path, 5, monkeypatch, ["mistake", "ends without rank 0"])
    with pytest.raises(UserError, match="bits: 3"):
        run(job)
    assert len(attempts_of(tmp_path)) == 1
    (tmp_path / "rank-0").unlink()

    def interrupt() -> None:
        if (tmp_path / "rank-0").exists() and (tmp_path / "rank-0").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.start(job, tick=interrupt, say=print)
    assert len(attempts_of(tmp_path)) <= 2
    until(lambda: not alive(int((tmp_path / "rank-0").read_text())))


def write_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"iter_{step:07d}").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


ELSEWHERE = ["megatron.save=elsewhere", "megatron.save_interval=5"]


@pytest.mark.parametrize(
    ("held", "flags", "words"),
    [
        ("run", ["--resume"], ["resume: ", "no checkpoint", "--overwrite", "megatron.save_interval"]),
        ("run", ["--resume-or-start", "megatron.save_interval=5"], ["holds a run already", "--overwrite"]),
        ("", [], ["run/checkpoints holds a run's checkpoints", "--resume", "from step 20"]),
        ("", ["--overwrite"], ["--resume", "step 20", "remove them", "run/checkpoints"]),
        ("", ["--overwrite", "--resume"], ["--resume", "not allowed with", "--overwrite"]),
        ("", ["--resume", "megatron.finetune=true"], ["megatron.finetune: True", "leave it out"]),
        ("", ["--resume-or-start"], ["megatron.save_interval: not set", "step 0"]),
        ("elsewhere", [*ELSEWHERE, "--overwrite"], ["elsewhere holds a run's checkpoints", "step 20"]),
        ("elsewhere", [*ELSEWHERE, "--resume", "megatron.load=other"], ["megatron.load: 'other'", "its own"]),
        ("nothing", [*ELSEWHERE, "--resume"], ["resume: elsewhere holds no checkpoint"]),
        (
            "nothing",
            [*ELSEWHERE, "launch.max_restarts=1", "megatron.load=other"],
            ["megatron.pretrained_checkpoint"],
        ),
    ],
)
def test_what_a_folder_holds_decides(
    held: str,
    flags: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`held`: a run that has ended in run/, else checkpoints, in run/ or elsewhere."""
    monkeypatch.chdir(tmp_path)
    if held in ("", "elsewhere"):
        write_checkpoint(tmp_path / "run", 20)
    if held == "elsewhere":
        (tmp_path / "run/checkpoints").rename("elsewhere")
    if held == "run":
        (tmp_path / "run").mkdir()
        (tmp_path / "run/config.yaml").write_text("kept")
        (tmp_path / "run/summary.json").write_text(json.dumps(SUMMARY))
    before = contents(tmp_path)
    assert main(["train", CONFIG, *SMALL, *flags, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert contents(tmp_path) == before


def record_of_a_run(folder: Path) -> None:
    names = ("config.yaml", "command.txt", "metrics.jsonl", "summary.json", "logs/rank-0.log")
    for name in (*names, "tensorboard/events", "failures/rank-1.json"):
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


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_whole", full)
    with pytest.raises(UserError, match=f"out: {tmp_path} cannot be written: No space left on device"):
        run_folder.begin(tmp_path, {"config.yaml": ""})


@contextlib.contextmanager
def at_work(folder: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """Another process that is at work in a folder."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with only_one(folder, "train"):
            ready.set()
            signal.pause()

    other = context.Process(target=hold)
    other.start()
    try:
        assert ready.wait(60)
        yield other
    finally:
        other.kill()
        other.join()


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 20)
    record_of_a_run(tmp_path)
    (tmp_path / ".lock").touch()
    before = contents(tmp_path)
    with at_work(tmp_path) as other:
        for flags in (["--resume"], ["--overwrite"], []):
            assert main(["train", CONFIG, *flags, "--out", str(tmp_path)]) == 2
            assert capsys.readouterr().err == (
                f"megatron-loco: error: out: another `train` is at work in {tmp_path}\n"
            )
        assert contents(tmp_path) == before
        with pytest.raises(UserError, match="at work"), only_one(tmp_path, "train", wait=0.5):
            pass
        other.kill()  # the lock goes with its process
        with only_one(tmp_path, "train", wait=60), only_one(tmp_path, "train"):
            pass


def test_a_second_run_that_saves_where_another_one_does_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_DYING_SECONDS", 0)
    saves, out = tmp_path / "saves", tmp_path / "out"
    with at_work(saves):
        for flags in (["--resume-or-start"], ["--overwrite"]):
            asked = ["train", CONFIG, *flags, f"megatron.save={saves}", "megatron.save_interval=5"]
            assert main([*asked, "--out", str(out)]) == 2
            assert capsys.readouterr().err == (
                f"megatron-loco: error: megatron.save: another `train` is at work in {saves}\n"
            )
    assert not out.exists()


def test_a_file_system_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with only_one(tmp_path, "train"):
        assert "has no locks" in capsys.readouterr().err


def test_several_runs_do_not_save_in_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["compare", CONFIG], ["ablate", "bits", "--task", "0"]):
        assert main([*command, *ELSEWHERE, "--out", str(tmp_path / "out")]) == 2
        assert "megatron.save: 'elsewhere': several runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    write_checkpoint(tmp_path / "loco", 20)
    assert main(["compare", CONFIG, "--overwrite", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'loco/checkpoints'} holds a run's checkpoints" in capsys.readouterr().err


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


def test_a_finished_run_is_evaluated_again_and_a_resume_that_the_ranks_refuse_is_one_line(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    settings = [*SMALL, "megatron.save_interval=2", "compression.strict_load=true", "launch.max_restarts=3"]
    arguments = ("train", CONFIG, *settings, "--out", str(out))
    summaries = []
    for more in ([], ["--resume"]):
        two = [*more, "megatron.train_iters=2"]
        done = warm_megatron_loco(*arguments, *two, folder=tmp_path / f"two{more}", trains=True)
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads((out / "summary.json").read_text()))
        assert [step for step, _ in records(out)] == [1, 2]
    for key in ("steps", "train_loss", "valid_loss", "gradient_wire", "weight_wire", "compensation_bytes"):
        assert summaries[0][key] == summaries[1][key]

    (checkpoint,) = (out / "checkpoints").glob("iter_*")
    metadata = FileSystemReader(checkpoint).read_metadata()
    del metadata.state_dict_metadata["megatron_loco.rank_1"]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    more = ("megatron.train_iters=4", "megatron.lr=2e-3", "megatron.override_opt_param_scheduler=true")
    done = warm_megatron_loco(*arguments, *more, "--resume", folder=tmp_path / "four", trains=True)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_killed_launcher_leaves_no_rank_behind(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock on the folder is gone: ranks that trained on would write beside the next run's."""
    from megatron_patch.megatron import run_script

    told, script = tmp_path / "pids", tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}} {{os.getppid()}}')\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(run_script, "main", lambda argv: runpy.run_path(str(script)))
    job = Job(Launch(device=device, nproc_per_node=1), script, [], tmp_path / "run")
    process = multiprocessing.get_context("fork").Process(target=run, args=(job,))
    process.start()
    until(lambda: told.exists() and len(told.read_text().split()) == 2)
    process.kill()
    process.join()
    for pid in map(int, told.read_text().split()):
        until(lambda pid=pid: not alive(pid))


def stopping_job(folder: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, fails: bool = False) -> Job:
    """Two ranks that run until SIGTERM, and save before they end if `saves`, or fail to do so if `fails`."""
    import torch  # noqa: F401  (once, and not in every forked rank)

    from megatron_patch.megatron import run_script

    folder.mkdir(exist_ok=True)

    def rank_main(argv: list[str]) -> int:
        ended: list[int] = []
        if saves:
            signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
        (folder / f"ready-{os.environ['RANK']}").touch()
        deadline = time.monotonic() + 300
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
        if fails:
            run_script._leave_failure(OSError("disk full"), user=False)
            return 1
        (folder / f"saved-{os.environ['RANK']}").touch()
        return 0

    monkeypatch.setattr(run_script, "main", rank_main)
    return Job(Launch(device="cpu", nproc_per_node=2, max_restarts=3), Path(SCRIPT), [], folder)


def asking(folder: Path, *numbers: signal.Signals) -> Callable[[], None]:
    """A tick that sends these signals to this process; SIGUSR1, as some schedulers do, to the ranks too."""
    left = list(numbers)

    def tick() -> None:
        if left and len(list(folder.glob("ready-*"))) == 2:
            number = left.pop(0)
            if number == signal.SIGUSR1:
                for pid in ranks_of(os.getpid()):
                    os.kill(pid, number)
            os.kill(os.getpid(), number)

    return tick


@pytest.mark.parametrize(
    ("numbers", "name"),
    [([signal.SIGUSR1], "SIGUSR1"), ([signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM], "SIGTERM")],
)
def test_ranks_may_save_and_nothing_is_started_again(
    numbers: list[signal.Signals], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in launcher.ASKING]
    job = stopping_job(tmp_path, monkeypatch, saves=True)
    assert launcher.start(job, asking(tmp_path, *numbers), say=pytest.fail) == name
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert [signal.getsignal(number) for number in launcher.ASKING] == before


def test_ranks_that_cannot_save_just_end_and_a_save_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stopping_job(tmp_path, monkeypatch, saves=False)
    assert launcher.start(job, asking(tmp_path, signal.SIGTERM), say=pytest.fail) == "SIGTERM"
    assert not list(tmp_path.glob("saved-*"))
    job = stopping_job(tmp_path / "other", monkeypatch, saves=True, fails=True)
    with pytest.raises(launcher.Stopped, match=r"stopped by SIGTERM, and rank \d failed: OSError: disk full"):
        launcher.start(job, asking(tmp_path / "other", signal.SIGTERM), say=pytest.fail)
