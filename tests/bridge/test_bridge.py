"""Megatron-Bridge for real, on 2 gloo ranks: `make test-bridge`. Elsewhere its wheel is not there.

Its provider calls `attach`, its `pretrain` trains, its checkpoints carry the error states.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_patch.integration.cpu.device import CPU_ENVIRONMENT

SCRIPT = Path(__file__).with_name("bridge_training.py")
STEPS, HALF = 10, 5

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
)


def train(folder: Path, stop: int, manager: str = "ours") -> str:
    """Everything that the ranks print."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(folder), str(STEPS), str(stop), manager],
        env=os.environ | CPU_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def _path() -> str:
    """With tests/, for stand_ins.py."""
    return os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's states of a checkpoint, and the error states' files as bytes."""
    checkpoint = folder / f"iter_{step:07}"
    whole = folder / f"whole-{step}.pt"
    dcp_to_torch_save(checkpoint, whole)
    found: dict[str, torch.Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                collect(f"{name}.{key}", one)

    collect("", torch.load(whole, weights_only=False))
    for file in sorted((checkpoint / "compression").glob("rank*")):
        found[file.name] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    return found


def test_bridge_resumes_bit_for_bit_with_the_error_states_in_its_checkpoint(tmp_path: Path) -> None:
    whole, halves, without = tmp_path / "whole", tmp_path / "halves", tmp_path / "without"
    log = train(whole, STEPS)
    assert "data parallel reduce-scatter over 2 ranks: 85,504 gradient elements" in log
    train(halves, HALF)
    assert "error states" in train(halves, STEPS)
    expected, resumed = tensors(whole, STEPS), tensors(halves, STEPS)
    assert expected.keys() == resumed.keys()
    assert sum(name.startswith("rank") for name in expected) == 2
    assert sum(one.numel() for one in expected.values()) > 3 * 85_504
    for name, one in expected.items():
        torch.testing.assert_close(resumed[name], one, rtol=0, atol=0, msg=name)

    assert "without error states" in train(without, HALF, "stock")
    train(without, STEPS, "stock")
    other = tensors(without, STEPS)
    assert any(not torch.equal(other[name], one) for name, one in expected.items() if name in other)
