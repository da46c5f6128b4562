"""A run that is asked to stop: its ranks get SIGTERM, may save, and the launcher says how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workflows.engine_runs import SCRIPT
from workflows.test_train import ranks_of

from megatron_patch.workflows.run import launcher
from megatron_patch.workflows.run.job import Job, Launch


def job_of(folder: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, fails: bool = False) -> Job:
    """Two ranks that run until SIGTERM, and save before they end if `saves`, or fail to do so if `fails`."""
    import torch  # noqa: F401  (once, and not in every forked rank)

    from megatron_patch.megatron import run_script

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
    [
        ([signal.SIGUSR1], "SIGUSR1"),
        ([signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM], "SIGTERM"),
    ],
)
def test_ranks_may_save_and_nothing_is_started_again(
    numbers: list[signal.Signals], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in launcher.ASKING]
    job = job_of(tmp_path, monkeypatch, saves=True)
    assert launcher.start(job, asking(tmp_path, *numbers), say=pytest.fail) == name
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert [signal.getsignal(number) for number in launcher.ASKING] == before


def test_ranks_that_cannot_save_just_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, monkeypatch, saves=False)
    assert launcher.start(job, asking(tmp_path, signal.SIGTERM), say=pytest.fail) == "SIGTERM"
    assert not list(tmp_path.glob("saved-*"))


def test_a_save_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, monkeypatch, saves=True, fails=True)
    with pytest.raises(launcher.Stopped, match=r"stopped by SIGTERM, and rank \d failed: OSError: disk full"):
        launcher.start(job, asking(tmp_path, signal.SIGTERM), say=pytest.fail)
