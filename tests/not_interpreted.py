"""Runs a test's script in a process of its own, where Triton compiles for a GPU instead of interpreting.

A Triton of another release compiles there, too: its wheel alone is enough, in a folder that comes first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def wheel_of_triton(release: str) -> Path:
    """The folder with that release of Triton, and with nothing that it asks for; it is installed once."""
    folder = TESTS.parent / ".compat" / f"triton-{release}"
    if not folder.exists():
        part = folder.with_suffix(f".{os.getpid()}")
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*uv, "--python", sys.executable, "--target", part, f"triton=={release}"], check=True)
        try:
            part.rename(folder)
        except OSError:  # Another test was faster.
            shutil.rmtree(part)
    return folder


def output_of(script: Path, *arguments: str, seconds: float, first: Path | None = None) -> str:
    """What it prints. It finds the tests' modules, and the package beside them, whatever is installed; the
    modules in the folder `first` before all others."""
    folders = [folder for folder in (first, TESTS.parent, TESTS) if folder is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
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
