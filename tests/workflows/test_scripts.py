"""The launch scripts: shell that a checker accepts, and the recipes that they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_patch.workflows.run.configuration import shipped

FOLDER = shipped("pretrain_scripts")
FAMILIES = sorted(FOLDER.glob("*.sh"))
SCRIPTS = [*FAMILIES, *sorted(FOLDER.glob("*/*.sbatch"))]
GPU_RECIPES = {
    path.stem for path in shipped("configs/models").glob("*.yaml") if "common/gpu" in path.read_text()
}
BASED = {"llama2_13b", "llama2_70b", "llama3_70b"}
"""Recipes that change another one of the same family."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def sizes(script: Path) -> dict[str, tuple[int, int, int]]:
    """A script's table: size -> GPUs, nodes, GPUs per node."""
    rows = re.findall(r"^#   (\w+) +(\d+) = (\d+) x (\d+) ", script.read_text(), re.MULTILINE)
    return {size: (int(gpus), int(nodes), int(each)) for size, gpus, nodes, each in rows}


def started(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script from a folder of its own, with a megatron-loco that only shows its arguments."""
    fake = folder / "bin" / "megatron-loco"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    return subprocess.run(
        [str(script), *arguments],
        cwd=folder,
        env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", FAMILIES, ids=lambda path: path.name)
def test_every_size_names_its_recipe_and_hardware(script: Path, tmp_path: Path) -> None:
    assert sizes(script)
    for size, (gpus, nodes, each) in sizes(script).items():
        done = started(script, tmp_path, size, "megatron.lr=1e-4", "--out", "a b")
        command, recipe, *rest = done.stdout.splitlines()
        assert (done.returncode, command, rest) == (0, "train", ["megatron.lr=1e-4", "--out", "a b"])
        assert f"# GPUs: {gpus} = {nodes} x {each} " in Path(recipe).read_text()
    done = started(script, tmp_path, "7x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("megatron-loco: error: SIZE: '7x' must be ")
    for size in sizes(script):
        assert size in done.stderr


def test_every_gpu_recipe_has_a_script(tmp_path: Path) -> None:
    named = set()
    for script in FAMILIES:
        for size in sizes(script):
            named.add(Path(started(script, tmp_path, size).stdout.splitlines()[1]).stem)
    assert named == GPU_RECIPES | BASED
