"""The scripts in benchmarks/ run; what they measure needs the machines that they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU_KERNELS = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_kernels.py"


def test_gpu_kernels_prints_and_writes_every_line(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    flags = ["--device", "cpu", "--elements", "16384", "--runs", "1", "--no-compile", "--json", str(numbers)]
    done = subprocess.run(
        [sys.executable, str(GPU_KERNELS), *flags],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(numbers.read_text())["rows"]
    assert len(done.stdout.splitlines()) == len(rows) == 9
    bytes_of = {row["what"]: row["bytes"] for row in rows}
    assert bytes_of["compress fp32, triton"] == pytest.approx(6.55 * 16384, rel=0.01)
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(GPU_KERNELS)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
