"""A run killed four times ends bit for bit as one that was left alone; `make soak` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_pool import in_warm_process
from workflows.engine_runs import prepare

from .short import main


def prepared(folder: Path) -> None:
    prepare()
    main(folder)


@pytest.mark.slow
def test_a_run_killed_four_times_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    in_warm_process(prepared, tmp_path, log=tmp_path / "log", timeout=200)
    assert "5 kills, and each run compared" in (tmp_path / "log").read_text()
