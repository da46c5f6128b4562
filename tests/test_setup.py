"""`make setup`: the environment is where VENV says, absolute or not. Python and uv are stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$STANDS_IN/python" "$STANDS_IN/uv" "$3/bin" ;;
  "--version") echo "Python 3.12" ;;
esac
"""
UV = """#!/bin/sh
echo "$VIRTUAL_ENV" >> "$STANDS_IN/uv.log"
"""


@pytest.mark.parametrize("absolute", [True, False])
def test_the_environment_is_where_venv_says(tmp_path: Path, absolute: bool) -> None:
    for name, script in (("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    home = tmp_path / "repository"
    home.mkdir()
    (home / "requirements.lock").write_text("uv==1.2.3\\n")
    venv = str(tmp_path / "elsewhere" / "venv") if absolute else "some/venv"
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "STANDS_IN": str(tmp_path)}
    subprocess.run(["bash", ROOT / "tools" / "setup.sh", venv], cwd=home, env=environment, check=True)
    assert (home / venv / "bin" / "uv").exists()
    assert set((tmp_path / "uv.log").read_text().split()) == {str(home / venv)}
