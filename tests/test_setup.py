"""`make setup`: the environment is where VENV says, absolute or not. Python and uv are stand-ins. And
hatch_build.py: what a wheel is called, and what becomes of it without a compiler."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hatchling.bridge.app import Application

import hatch_build

ROOT = Path(__file__).resolve().parents[1]

PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$STANDS_IN/python" "$STANDS_IN/uv" "$3/bin" ;;
  "--version") echo "Python 3.12" ;;
esac
"""
UV = """#!/bin/sh
echo "$VIRTUAL_ENV: $*" >> "$STANDS_IN/uv.log"
"""


def set_up(tmp_path: Path, *arguments: str) -> list[str]:
    """What uv was asked for, by tools/setup.sh called in tmp_path/repository."""
    for name, script in (("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    home = tmp_path / "repository"
    home.mkdir()
    (home / "requirements.lock").write_text("uv==1.2.3\\n")
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "STANDS_IN": str(tmp_path)}
    subprocess.run(["bash", ROOT / "tools" / "setup.sh", *arguments], cwd=home, env=environment, check=True)
    return (tmp_path / "uv.log").read_text().splitlines()


@pytest.mark.parametrize("absolute", [True, False])
def test_the_environment_is_where_venv_says(tmp_path: Path, absolute: bool) -> None:
    venv = str(tmp_path / "elsewhere" / "venv") if absolute else "some/venv"
    asked = set_up(tmp_path, venv)
    place = tmp_path / "repository" / venv
    assert (place / "bin" / "uv").exists()
    assert all(line.startswith(f"{place}: ") for line in asked)
    assert "sync" in " ".join(asked)


def test_packages_that_are_named_are_all_that_is_installed(tmp_path: Path) -> None:
    (asked,) = set_up(tmp_path, "venv", "hatchling", "auditwheel")
    assert asked.endswith(": pip install --quiet --constraint requirements.lock hatchling auditwheel")


COMPILER = """#!/bin/sh
echo "$0 $*" >> "$STANDS_IN/compiler.log"
for word; do last=$word; done
touch "$last"
"""
"""Stands in for a compiler: the last word of each of our command lines is the output."""


def hook(root: Path) -> tuple[dict[str, Any], Path]:
    """What the build hook says of a wheel, and where the library would lie in the sources."""
    sources = root / hatch_build.SOURCES
    sources.mkdir(parents=True)
    (sources / "kernels.cpp").touch()
    build: dict[str, Any] = {"artifacts": [], "force_include": {}}
    built = hatch_build.NativeKernels(str(root), {}, None, None, str(root), "wheel", Application())  # type: ignore[arg-type]
    built.initialize("standard", build)
    return build, sources / hatch_build.LIBRARY


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin/nowhere")
    monkeypatch.setenv("STANDS_IN", str(tmp_path))
    for variable in ("CXX", "MEGATRON_LOCO_MACHINE"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def compiler(programs: Path, name: str) -> None:
    (programs / name).write_text(COMPILER.replace("touch", "/usr/bin/touch"))
    (programs / name).chmod(0o755)


def test_without_a_compiler_the_wheel_is_pure_and_one_line_says_so(tmp_path, programs, capfd):
    build, library = hook(tmp_path / "root")
    assert build == {"artifacts": [], "force_include": {}}
    assert not library.exists()
    (line,) = [line for line in "".join(capfd.readouterr()).splitlines() if line.strip()]
    assert "the CPU kernels were not compiled (torch is used instead): no C++ compiler" in line


def test_a_compiler_s_wheel_is_for_this_machine(tmp_path, programs):
    compiler(programs, "g++")
    build, library = hook(tmp_path / "root")
    assert library.exists()
    assert build["artifacts"] == [str(hatch_build.SOURCES / hatch_build.LIBRARY)]
    assert build["tag"].startswith("py3-none-linux_")
    assert build["pure_python"] is False


def test_a_wheel_for_another_machine_takes_its_compiler_or_fails(tmp_path, programs, monkeypatch):
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("MEGATRON_LOCO_MACHINE", "aarch64")
    compiler(programs, "g++")
    with pytest.raises(FileNotFoundError, match="aarch64-linux-gnu-g\\+\\+"):
        hook(tmp_path / "without")
    compiler(programs, "aarch64-linux-gnu-g++")
    build, library = hook(tmp_path / "root")
    assert not library.exists(), "this machine's library is left alone"
    ((made, inside),) = build["force_include"].items()
    assert Path(made).exists()
    assert inside == str(hatch_build.SOURCES / hatch_build.LIBRARY)
    assert build["tag"] == "py3-none-linux_aarch64"
    assert "x86-64" not in (tmp_path / "compiler.log").read_text()
