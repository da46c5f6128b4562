"""Runs a test's script in a process of its own, where Triton compiles for a GPU instead of interpreting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def output_of(script: Path, *arguments: str, seconds: float) -> str:
    """What it prints. It finds the tests' modules, and the package beside them, whatever is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
