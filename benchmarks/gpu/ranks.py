"""A part of benchmarks.gpu, for torchrun: is off stock, and is the exact gather exact, on real ranks?

Ranks that share a GPU exchange over gloo with tensors on the GPU, since NCCL refuses two ranks on one; their
times mean nothing. Ranks with a GPU each exchange over NCCL.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # Deterministic products.

import torch
import torch.distributed as dist

import megatron_patch
from benchmarks.gpu import model
from benchmarks.gpu.part import attempt, tell
from benchmarks.gpu.step import start_ranks
from benchmarks.network.training import Training, initialize
from megatron_patch.megatron import doors

FRAMEWORKS: dict[str, Callable[[Any, str], Training]] = {
    "Megatron": lambda llama, method: model.megatron(llama, method, llama.parameters // 4),
    "FSDP2": model.fsdp2,
}
RUNS = {
    "Megatron": ("stock", "stock again", "none", "none+exact", "loco", "loco+exact"),
    "FSDP2": ("stock", "none", "loco"),
}
SAME = (("stock", "stock again"), ("stock", "none"), ("none", "none+exact"), ("loco", "loco+exact"))
"""Pairs of runs that end with the same bits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="30m", choices=model.SHAPES)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    start_ranks()
    initialize()
    tell(backend=dist.get_backend(), device=model.DEVICE.type, ranks=dist.get_world_size())
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    for framework, runs in RUNS.items():
        ends: dict[str, Any] = {}
        for run in runs:
            attempt(f"{framework}, {run}", train, framework, run, args, ends)
            doors.disable()
        pairs = [pair for pair in SAME if set(pair) <= set(ends)]
        tell(checks={f"{framework}: {a} = {b}, bit for bit": ends[a] == ends[b] for a, b in pairs})
    dist.destroy_process_group()


def train(framework: str, run: str, args: argparse.Namespace, ends: dict[str, Any]) -> None:
    """Make steps; put losses and a digest of the weights of every rank into `ends`."""
    training = FRAMEWORKS[framework](model.SHAPES[args.model], run.removesuffix(" again"))
    losses = []
    for _ in range(args.steps):
        training.step(1)
        losses.append(float(training.losses[0]["loss"]))
    if framework == "Megatron":  # The last step's weights, which the next forward pass would gather.
        training.model.start_param_sync(force_sync=True)
    weights = [getattr(one, "_local_tensor", one).detach() for one in training.model.parameters()]
    ends[run] = [None] * dist.get_world_size()
    dist.all_gather_object(ends[run], (losses, [digest(one) for one in weights]))
    checks = {f"{framework}, {run}: losses are finite": all(abs(loss) < 1e9 for loss in losses)}
    if framework == "Megatron":
        checks[f"{framework}, {run}: ranks agree"] = all(end[1] == ends[run][0][1] for end in ends[run])
    found: dict[str, Any] = {"losses": losses}
    if run.startswith("loco"):
        found["bits_per_gradient"] = megatron_patch.report(training.model).bits_per_gradient
    tell(runs={f"{framework}, {run}": found}, checks=checks)
    training.close()


def digest(tensor: torch.Tensor) -> int:
    """Return a number that differs where any bit does, but for chance."""
    bits = tensor.contiguous().view(torch.int16).to(torch.int64).reshape(-1)
    return int((bits * (torch.arange(bits.numel(), device=bits.device) % 65_521 + 1)).sum())


if __name__ == "__main__":
    main()
