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

from megatron_patch.megatron.cpu.device import CPU_ENVIRONMENT

SCRIPT = Path(__file__).with_name("bridge_training.py")
STEPS, HALF = 10, 5

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
)


def train(folder: Path, stop: int, change: str) -> str:
    """Everything that the ranks print; `change` is none or async (saves)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(folder), str(STEPS), str(stop), change],
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
    """Weights, the optimizer's states and the error states of a checkpoint."""
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
    return found


@pytest.mark.parametrize("change", ["none", "async"])
def test_bridge_resumes_bit_for_bit_with_the_error_states_in_its_checkpoint(
    tmp_path: Path, change: str
) -> None:
    """With Bridge's own checkpoint manager, and no line but the hook."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    log = train(whole, STEPS, change)
    assert "data parallel reduce-scatter over 2 ranks: 85,504 gradient elements" in log
    train(halves, HALF, change)
    assert "step 5: error states restored exactly" in train(halves, STEPS, change)
    expected, resumed = tensors(whole, STEPS), tensors(halves, STEPS)
    assert expected.keys() == resumed.keys()
    assert sum("megatron_loco.rank_" in name for name in expected) == 2
    assert sum(one.numel() for one in expected.values()) > 3 * 85_504
    for name, one in expected.items():
        torch.testing.assert_close(resumed[name], one, rtol=0, atol=0, msg=name)
