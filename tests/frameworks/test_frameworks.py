"""verl's `get_model` and ms-swift's `wrap_model` on 2 gloo ranks: `make test-frameworks`.

What `enable` attaches to in them trains as in Megatron's own DistributedDataParallel. Elsewhere the wheels
are not there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.megatron.cpu.device import CPU_ENVIRONMENT

SCRIPT = Path(__file__).with_name("framework_training.py")
FOLDER = os.environ.get("FRAMEWORKS", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="the frameworks' wheels are not here")


@functools.cache
def trained(framework: str, method: str, *more: str) -> tuple[list[str], str]:
    """The losses, bit for bit, and the report (with a checkpoint: all that is logged)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, str(SCRIPT), framework, str(Path(FOLDER, framework)), method, *more],
        env=os.environ | CPU_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    report = [text for word, _, text in lines if word == "report"]
    told = done.stderr if more else report[0] if report else ""
    return [text for word, _, text in lines if word == "loss"], told


@pytest.mark.parametrize("framework", ["verl", "swift"])
def test_a_frameworks_own_checkpoint_keeps_the_errors(framework: str, tmp_path: Path) -> None:
    """Losses go on bit for bit; no line but `enable`."""
    whole, _ = trained(framework, "loco", "save", str(tmp_path / "checkpoint"))
    resumed, told = trained(framework, "loco", "load", str(tmp_path / "checkpoint"))
    assert resumed == whole[3:]
    assert "step 3: error states restored exactly" in told


@pytest.mark.parametrize("framework", ["verl", "swift"])
def test_what_a_framework_wraps_is_compressed_as_megatrons_own(framework: str) -> None:
    stock, _ = trained("megatron", "off")
    coded, report = trained("megatron", "naive")
    assert len(stock) == 6
    assert stock[0] == coded[0]
    assert stock != coded
    assert "4 bits: 4." in report
    assert trained(framework, "off") == (stock, "")
    assert trained(framework, "none")[0] == stock
    assert trained(framework, "naive") == (coded, report)
