"""The launch scripts: shell that a checker accepts, and the recipes that they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from megatron_patch.workflows.run.configuration import shipped

FOLDER = shipped("pretrain_scripts")
FAMILIES = sorted(FOLDER.glob("*.sh"))


def test_shell() -> None:
    checker = shutil.which("shellcheck")
    for script in [*FAMILIES, *FOLDER.glob("*/*.sbatch")]:
        assert os.access(script, os.X_OK)
        assert "set -euo pipefail" in script.read_text()
        for command in [["bash", "-n"], [checker]] if checker else [["bash", "-n"]]:
            subprocess.run([*command, str(script)], check=True)


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


def test_every_size_names_its_recipe_and_hardware_and_every_gpu_recipe_has_a_script(tmp_path: Path) -> None:
    named = set()
    for script in FAMILIES:
        assert sizes(script)
        for size, (gpus, nodes, each) in sizes(script).items():
            done = started(script, tmp_path, size, "megatron.lr=1e-4", "--out", "a b")
            command, recipe, *rest = done.stdout.splitlines()
            assert (done.returncode, command, rest) == (0, "train", ["megatron.lr=1e-4", "--out", "a b"])
            assert f"# GPUs: {gpus} = {nodes} x {each} " in Path(recipe).read_text()
            named.add(Path(recipe).stem)
        done = started(script, tmp_path, "7x")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("megatron-loco: error: SIZE: '7x' must be ")
    based = {"llama2_13b", "llama2_70b", "llama3_70b"}  # they change another one of the same family
    models = shipped("configs/models").glob("*.yaml")
    assert named == based | {path.stem for path in models if "common/gpu" in path.read_text()}
