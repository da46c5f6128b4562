"""Megatron's tracker file, and what a kill can make of it."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_patch.integration.checkpoint import tracker


def test_a_tracker_file_emptied_by_a_kill_is_mended(tmp_path: Path) -> None:
    tracker.repair(tmp_path)
    assert tracker.latest(tmp_path) is None
    (tmp_path / "iter_0000040").mkdir()  # left unfinished by an earlier attempt, which reached step 40
    os.utime(tmp_path / "iter_0000040", (1, 1))
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / tracker.NAME).write_text("")
    assert tracker.latest(tmp_path) is None
    tracker.repair(tmp_path)
    assert tracker.latest(tmp_path) == 20


def test_a_whole_tracker_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "iter_0000020").mkdir()
    for text in ("10", "release"):
        (tmp_path / tracker.NAME).write_text(text)
        tracker.repair(tmp_path)
        assert (tmp_path / tracker.NAME).read_text() == text
