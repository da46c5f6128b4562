"""A part of benchmarks.gpu: is off stock, and is the exact gather exact, on real ranks?

Ranks that share a GPU exchange over gloo with tensors on the GPU, since NCCL refuses two ranks on one; their
times mean nothing. Ranks with a GPU each exchange over NCCL.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # Deterministic products.

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

import megatron_patch
from benchmarks.gpu import model
from benchmarks.gpu.part import tell
from benchmarks.gpu.step import start_ranks
from benchmarks.network.training import initialize
from megatron_patch.megatron import doors

RUNS = {
    "Megatron": ("stock", "stock again", "none", "none+exact", "loco", "loco+exact"),
    "FSDP2": ("stock", "none", "loco"),
}
SAME = (("stock", "stock again"), ("stock", "none"), ("none", "none+exact"), ("loco", "loco+exact"))
"""Pairs of runs that end with the same bits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=RUNS)
    parser.add_argument("--model", default="30m", choices=model.SHAPES)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    start_ranks()
    initialize()
    tell(backend=dist.get_backend(), device=model.DEVICE.type, ranks=dist.get_world_size())
    if dist.get_backend() == "gloo":
        gather_one_by_one()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    ends: dict[str, Any] = {}
    for run in RUNS[args.framework]:
        train(args, run, ends)
        pairs = [pair for pair in SAME if run in pair and set(pair) <= set(ends)]
        tell(checks={f"{a} = {b}, bit for bit": ends[a] == ends[b] for a, b in pairs})
        doors.disable()
    dist.destroy_process_group()


def gather_one_by_one() -> None:
    """Replace gloo's coalesced all-gather, which reads the GPU's pointers on the host (pytorch 152645)."""

    class Works(list[Any]):
        def wait(self, timeout: Any = None) -> bool:
            return all(work.wait() for work in self)

    group: Any = dist.ProcessGroup
    for coalesced, of_one in (
        ("allgather_into_tensor_coalesced", "_allgather_base"),
        ("all_gather_single_coalesced", "all_gather_single"),
    ):
        if hasattr(group, coalesced):

            def gather(self: Any, outputs: Any, inputs: Any, *_: Any, of_one: str = of_one) -> Works:
                pairs = zip(outputs, inputs, strict=True)
                return Works(getattr(self, of_one)(*pair, AllgatherOptions()) for pair in pairs)

            setattr(group, coalesced, gather)


def train(args: argparse.Namespace, run: str, ends: dict[str, Any]) -> None:
    """Make steps; put losses and a digest of the weights of every rank into `ends`."""
    llama, method = model.SHAPES[args.model], run.removesuffix(" again")
    megatron = args.framework == "Megatron"
    training: Any = (
        model.megatron(llama, method, llama.parameters // 4) if megatron else model.fsdp2(llama, method)
    )
    losses = []
    for _ in range(args.steps):
        training.step(1)
        losses.append(float(training.losses[0]["loss"]))
    if megatron:  # The last step's weights, which the next forward pass would gather.
        training.model.start_param_sync(force_sync=True)
    weights = [getattr(one, "_local_tensor", one).detach() for one in training.model.parameters()]
    ends[run] = [None] * dist.get_world_size()
    dist.all_gather_object(ends[run], (losses, [digest(one) for one in weights]))
    checks = {f"{run}: losses are finite": all(abs(loss) < 1e9 for loss in losses)}
    if megatron:
        checks[f"{run}: ranks agree"] = all(end[1] == ends[run][0][1] for end in ends[run])
    found: dict[str, Any] = {"losses": losses}
    if run.startswith("loco"):
        found["bits_per_gradient"] = megatron_patch.report(training.model).bits_per_gradient
    tell(runs={run: found}, checks=checks)
    training.close()


def digest(tensor: torch.Tensor) -> int:
    """Return a number that differs where any bit does, but for chance."""
    bits = tensor.contiguous().view(torch.int16).to(torch.int64).reshape(-1)
    return int((bits * (torch.arange(bits.numel(), device=bits.device) % 65_521 + 1)).sum())


if __name__ == "__main__":
    main()
