"""The workflows of a public forge: valid by their schema, and made of this repository's own commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCHEMA = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]


def test_workflows_are_valid() -> None:
    subprocess.run([*SCHEMA, *WORKFLOWS], check=True)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_they_call_what_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    called = {name for command in commands for name in re.findall(r"^make ([a-z-]+)", command)}
    assert called <= targets
    assert called or any(".ci/run" in command for command in commands)
    assert job["timeout-minutes"] <= 120
