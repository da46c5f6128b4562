"""A run killed four times ends bit for bit as one that was left alone; `make soak` is the long form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .harness import ROOT


def test_a_run_killed_four_times_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.short", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
