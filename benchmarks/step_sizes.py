"""How large Adam's steps are, in units of the learning rate, under a gradient exchange.

    megatron-loco train configs/models/llama_tiny.yaml launch.script=benchmarks/step_sizes.py \
        compression.method=error_feedback compression.bits=1 --out runs/steps

Megatron's pretrain_gpt.py, and in the run's folder step_sizes.json: the mean over optimizer steps and
coordinates (of rank 0's shards) of |m| / (sqrt(v) + eps), both with bias correction; and the same for the
four quarters of the coordinates in the order of sqrt(v), smallest first. Adam divides by the size of what
arrives: where that is mostly quantization noise, its steps are small, whatever the mean of it is.
"""

from __future__ import annotations

import json
import runpy
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_SCRIPT = Path(__file__).resolve().parents[1] / "pretrain_scripts" / "pretrain_gpt.py"
_QUARTERS: list[list[float]] = []


def _measure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After every step of torch's Adam: the mean size of the step in each quarter of the coordinates."""
    sizes, roots = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or not parameter.numel():
                continue
            first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
            root = (state["exp_avg_sq"].flatten() / second).sqrt()
            sizes.append((state["exp_avg"].flatten() / first).abs() / (root + group["eps"]))
            roots.append(root)
    if sizes:
        ordered = torch.cat(sizes)[torch.cat(roots).argsort()]
        _QUARTERS.append([quarter.mean().item() for quarter in ordered.tensor_split(4)])


def main() -> None:
    """Train, then write step_sizes.json."""
    register_optimizer_step_post_hook(_measure)
    runpy.run_path(str(_SCRIPT), run_name="__main__")
    from megatron.training import get_args

    if torch.distributed.get_rank() == 0:
        quarters = [statistics.fmean(values) for values in zip(*_QUARTERS, strict=True)]
        content = {"steps": len(_QUARTERS), "mean": statistics.fmean(quarters), "quarters": quarters}
        folder = Path(get_args().compression_output)
        (folder / "step_sizes.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
