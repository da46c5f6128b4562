"""A command whose extra is not installed says so in a line, and imports nothing else."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_patch.workflows import cli

ROOT = Path(__file__).resolve().parents[2]
MODULES = {name for names in cli.EXTRAS.values() for name in names}
DISTRIBUTIONS = {"pyyaml": "yaml"}

WITHOUT = """
import importlib.abc, importlib.util, sys
blocked = set(sys.argv[1].split(","))
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in blocked else find(name, *rest)
from megatron_patch.workflows.cli import main
sys.exit(main(sys.argv[2:]))
"""
"""The command line where some modules are not installed."""


def run_without(modules: set[str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(modules), *argv], capture_output=True, text=True, check=False
    )


def test_the_core_is_three_packages_and_extras_bring_what_commands_are_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    assert {one.name for one in found} == {"torch", "megatron-core", "numpy"}
    for extra, modules in cli.EXTRAS.items():
        brought = {Requirement(line).name for line in project["optional-dependencies"][extra]}
        assert set(modules) <= {DISTRIBUTIONS.get(name, name) for name in brought}


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_a_command_needs_no_more_than_its_extras(command: str) -> None:
    extras = cli._COMMANDS[command][2]
    there = {name for extra in extras for name in cli.EXTRAS[extra]}
    done = run_without(MODULES - there, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: megatron-loco {command}")


def test_a_command_whose_extra_is_not_installed_says_so() -> None:
    command, extra = next((name, entry[2][-1]) for name, entry in cli._COMMANDS.items() if entry[2])
    last = cli.EXTRAS[extra][0]
    done = run_without({last}, command)
    line = f"megatron-loco: error: {command} needs {last}: pip install 'megatron-loco[{extra}]'\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_the_list_of_commands_needs_nothing() -> None:
    done = run_without(MODULES | {"torch"}, "--help")
    assert all(command in done.stdout for command in cli._COMMANDS)
