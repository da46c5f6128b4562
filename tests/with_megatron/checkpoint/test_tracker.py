"""Megatron's tracker file, and what a kill can make of it."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest
from seeds import SEED

from megatron_patch.megatron.checkpoint import tracker


def write(path: Path, time: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("content")
    os.utime(path, (time, time))


@pytest.mark.parametrize("last", ["metadata.json", ".metadata", "mp_rank_00_001/model_optim_rng.pt"])
def test_a_tracker_file_emptied_by_a_kill_is_repaired(tmp_path: Path, last: str) -> None:
    """Beside it are a checkpoint of an earlier attempt, which reached step 40, and an unfinished one."""
    tracker.repair(tmp_path)
    assert tracker.latest(tmp_path) is None
    write(tmp_path / "iter_0000040" / last, 1)
    write(tmp_path / "iter_0000020" / last, 2)
    write(tmp_path / "iter_0000030" / (".metadata" if last == "metadata.json" else "__0_0.distcp"), 3)
    (tmp_path / tracker.NAME).write_text("")
    assert tracker.latest(tmp_path) is None
    tracker.repair(tmp_path)
    assert tracker.latest(tmp_path) == 20


def test_other_contents_of_a_tracker_file_are_left_alone(tmp_path: Path) -> None:
    """Whole or not, none raises: one rank repairs while all others wait for it."""
    (tmp_path / "iter_0000020").mkdir()
    generator = random.Random(SEED)
    noise = bytes(generator.randrange(1, 256) for _ in range(40))
    for text in (b"10", b"release", b"\xff\xfe20", noise, b"\0"):
        (tmp_path / tracker.NAME).write_bytes(text)
        tracker.repair(tmp_path)
        tracker.latest(tmp_path)
        assert (tmp_path / tracker.NAME).read_bytes() == text


def test_only_folders_with_a_number_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / tracker.NAME).write_text("")
    for name in ("iter_0000020.bak", "iter_", "iter_x", "iter_-000030", "iter_\u0663"):
        write(tmp_path / name / "metadata.json", 2)
    (tmp_path / "iter_0000050").write_text("a file")
    with caplog.at_level(logging.WARNING):
        tracker.repair(tmp_path)
    assert "no checkpoint beside it is complete" in caplog.text
    assert tracker.latest(tmp_path) is None
    write(tmp_path / "iter_0000010" / "metadata.json")
    tracker.repair(tmp_path)
    assert tracker.latest(tmp_path) == 10


def test_what_cannot_be_repaired_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path / "iter_0000010" / "metadata.json")
    (tmp_path / tracker.NAME).write_text("")
    monkeypatch.setattr(tracker, "write_whole", full)
    with caplog.at_level(logging.WARNING):
        tracker.repair(tmp_path)
    assert "cannot be repaired: [Errno 28] No space left" in caplog.text
