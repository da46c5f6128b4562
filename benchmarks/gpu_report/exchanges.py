"""Measures one bucket's exchange: torchrun starts this on every rank, and rank 0 prints one line of JSON.

Megatron's reduce-scatter sends a bucket's gradients to their owners in bf16, this package's exchange in low
bits. NCCL needs a GPU for each rank; with fewer GPUs the ranks use gloo, with tensors on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import Setup
from megatron_patch.collectives.makers import make_reduce_scatters
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Contents


def main() -> None:
    """Measure, and print `{"ranks", "backend", "elements", "seconds": {what: seconds}}`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group("nccl" if _a_gpu_each() else "gloo")
    assert dist.group.WORLD is not None
    group, rank = dist.group.WORLD, dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elements = args.elements // (16 * group.size()) * 16 * group.size()
    gradient = torch.randn(elements, device=device)
    shard = torch.empty(elements // group.size(), device=device)
    ways: dict[str, Callable[[], object]] = {}
    halves, half = gradient.bfloat16(), shard.bfloat16()
    ways["reduce-scatter in bf16"] = lambda: _reduce_scatter(half, halves)
    for bits in (4, 2):
        config = CompressionConfig(bits=bits, topology="flat", method="naive")
        workspace = Workspace(device)
        setup = Setup(config, workspace)
        (exchange,) = make_reduce_scatters([Contents(elements)], group, setup).exchanges
        ways[f"{bits} bits"] = lambda exchange=exchange: exchange.start(gradient, shard, True).wait()  # type: ignore[misc]
    found = {what: _seconds(way, device, args.runs) for what, way in ways.items()}
    if rank == 0:
        said = {"ranks": group.size(), "backend": dist.get_backend(), "elements": elements}
        print(json.dumps(said | {"seconds": found}))
    dist.destroy_process_group()


def _a_gpu_each() -> bool:
    return torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])


def _reduce_scatter(output: torch.Tensor, whole: torch.Tensor) -> None:
    """Run NCCL's reduce-scatter, or with gloo an all-to-all and a sum, which send as many bytes."""
    if dist.get_backend() == "nccl":
        dist.reduce_scatter_tensor(output, whole)
        return
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    output.copy_(received.view(dist.get_world_size(), -1).sum(0))


def _seconds(way: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the median over runs of the slowest rank's seconds."""
    measured = []
    for _ in range(runs + 1):
        dist.barrier()
        began = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        measured.append(time.perf_counter() - began)
    slowest = torch.tensor(measured[1:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


if __name__ == "__main__":
    main()
