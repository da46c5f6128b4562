"""What 4 bits cost in quality: paired runs of 300 steps, dense and mixture of experts. Half an hour."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2, 3)
STEPS = 300
BAR_PERCENT = 0.5


def compared(recipe: str, seed: int, folder: Path) -> tuple[float, float]:
    """(validation loss of method none, by how many percent LoCo's differs from it)."""
    command = [sys.executable, "-m", "megatron_patch.workflows.cli", "compare"]
    command += [f"configs/models/{recipe}.yaml", "--methods", "none,loco", "--out", str(folder)]
    command += [f"megatron.seed={seed}", f"megatron.train_iters={STEPS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "comparison.json").read_text())
    loco = found["runs"]["loco"]
    assert (loco["bits"], loco["steps"]) == (4, STEPS)
    assert loco["gradient_wire"]["bits_per_element"] < 4.2
    return found["runs"]["none"]["valid_loss"], found["valid_loss_difference_percent"]["loco"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama_1m", "moe_tiny"])
def test_four_bits_end_within_half_a_percent_of_uncompressed(recipe: str, tmp_path: Path) -> None:
    pairs = [compared(recipe, seed, tmp_path / str(seed)) for seed in SEEDS]
    losses, differences = zip(*pairs, strict=True)
    told = ", ".join(f"{d:+.2f} %" for d in differences)
    spread = 100 * (max(losses) - min(losses)) / min(losses)
    mean = statistics.mean(differences)
    print(f"{recipe}: {told}; mean {mean:+.2f} %; uncompressed seeds lie {spread:.2f} % apart")
    assert all(loss < 2.5 for loss in losses), "a model that learned nothing tells nothing"
    assert abs(mean) <= BAR_PERCENT, told
