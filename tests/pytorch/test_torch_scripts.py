"""The scripts that train on PyTorch alone: they run as their first lines say, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "ranks", "arguments"),
    [("fsdp2_loop.py", 4, []), ("fsdp2_loop.py", 4, ["2"]), ("trainer.py", 2, [])],
    ids=["flat", "hybrid", "trainer"],
)
def test_a_script_trains_as_it_says(script: str, ranks: int, arguments: list[str], tmp_path: Path) -> None:
    source = (ROOT / "pretrain_scripts" / script).read_text()
    assert f"torchrun --nproc-per-node {ranks} {' '.join([script, *arguments])}\n" in source
    # A narrow model learns as well, and ranks that share a core are done sooner.
    small = source.replace("BATCH, LENGTH, WIDTH = 40, 8, 64, 128", "BATCH, LENGTH, WIDTH = 40, 4, 32, 64")
    assert (small != source) == (script == "fsdp2_loop.py")
    (tmp_path / script).write_text(small)
    printed = trained(tmp_path / script, ranks, arguments)
    losses = [float(loss) for loss in re.findall(r"^(?:loss |\{'loss': ')([\d.]+)", printed, re.MULTILINE)]
    found = re.findall(r"([\d.]+) bits/gradient|bits_per_gradient': '([\d.]+)", printed)
    bits = [float(said or logged) for said, logged in found]
    assert len(losses) == len(bits) >= 3
    assert losses[-1] < losses[0] - 0.5
    assert bits[-1] < 5


@pytest.mark.parametrize(
    ("replicas", "where"), [(1, "reduce-scatter over 2"), (2, "all-reduce between 2 replicas")]
)
def test_accelerate_trains_under_fsdp2(replicas: int, where: str) -> None:
    """Also with its accumulation of two microbatches, which exchanges once a step."""
    printed = trained(Path(__file__).with_name("accelerate_loop.py"), 2 * replicas, [str(replicas)])
    assert f"megatron-loco: FSDP2 {where}" in printed
    found = re.findall(r"^loss ([\d.]+), ([\d.]+) bits/gradient", printed, re.MULTILINE)
    losses, bits = zip(*((float(loss), float(count)) for loss, count in found), strict=True)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    assert 4 < bits[0] == bits[-1] < 5


def trained(script: Path, ranks: int, arguments: list[str]) -> str:
    """What the script prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*command, script.name, *arguments],
        cwd=script.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout + run.stderr
