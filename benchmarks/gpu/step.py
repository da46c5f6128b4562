"""A part of benchmarks.gpu: what compression changes in a training step.

On one GPU it is one of N data-parallel ranks (twin_group.py), at several simulated links. Under torchrun
every rank is real, and the link is the machine's. For each method it tells the step's seconds and bytes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")

import torch
import torch.distributed as dist

from benchmarks.gpu import model
from benchmarks.gpu.part import ON_GPU, attempt, synchronize, tell
from benchmarks.gpu.twin_group import TwinsRead, Wire
from megatron_patch.megatron import doors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="350m", choices=model.SHAPES)
    parser.add_argument("--ranks", type=int, default=8, help="of which one is real, without torchrun")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--links", default="none,400,100,25", help="Gbit/s of a rank, each way")
    parser.add_argument("--methods", default=";".join(model.METHODS))
    parser.add_argument("--trace", type=Path, help="folder for profiles of stock and of the exact gather")
    parser.add_argument("--seconds", type=float, default=120, help="no method begins later")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    twins = TwinsRead() if ranks == 1 else None
    links: list[tuple[str, float | None]] = [("its own links", None)]
    if twins is None:
        start_ranks()
    else:
        model.one_of(args.ranks)
        given = [None if link == "none" else float(link) for link in args.links.split(",")]
        links = [
            ("no link" if g is None else f"{g:g} Gbit/s", None if g is None else g / 8e-9) for g in given
        ]
        if ON_GPU:
            tell(wire_seconds_of_5_ms=Wire.seconds_of_5_ms())
    llama = model.SHAPES[args.model]
    tell(
        model=args.model,
        parameters=llama.parameters,
        ranks=dist.get_world_size(),
        backend=dist.get_backend(),
        connections=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
    )
    for method in args.methods.split(";"):
        if time.monotonic() < end:
            attempt(method, measure, method, llama, args, links, twins)
        doors.disable()
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def start_ranks() -> None:
    """Join torchrun's ranks: over NCCL if each has a GPU, else over gloo."""
    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    own = torch.cuda.device_count() >= ranks_here
    if ON_GPU:
        torch.cuda.set_device(local if own else 0)
    dist.init_process_group("nccl" if own else "gloo")


def measure(method: str, llama: Any, args: Any, links: Any, twins: TwinsRead | None) -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    began, Wire.bytes_per_second = time.monotonic(), None
    training = model.megatron(llama, method)
    if twins is not None:
        twins.checks, twins.decoded, twins.wrong = True, 0, 0
    losses = []
    for _ in range(3):
        training.step(1)
        losses.append(float(training.losses[0]["loss"]))
    checks = {f"{method}: losses are finite": all(loss == loss and abs(loss) < 1e9 for loss in losses)}
    if twins is not None:
        twins.checks = False
        if method.endswith("exact"):
            checks[f"{method}: decoded shards are the sender's"] = twins.decoded > 0 and not twins.wrong
    found: dict[str, Any] = {"losses": losses, "ready_seconds": time.monotonic() - began}
    if ON_GPU:
        found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    tell(methods={method: found}, checks=checks)
    for name, rate in links:
        Wire.bytes_per_second = rate
        training.step(1)
        synchronize()
        Wire.sent = 0.0
        times = timed(args.steps, training)
        if twins is not None:
            times["sent_bytes"] = Wire.sent / (2 * args.steps)
        times |= {"gradient_bytes": training.gradient_bytes, "weight_bytes": training.weight_bytes}
        tell(methods={method: {name: times}})
    Wire.bytes_per_second = None
    if method == "stock":
        seconds = arithmetic(args.steps, training)
        flops = model.flops(llama) / seconds
        tell(methods={method: {"forward_backward_seconds": seconds, "model_flops_per_second": flops}})
    if args.trace and ON_GPU and method in ("stock", "loco+exact"):
        Wire.bytes_per_second = links[-1][1]
        trace(training, args.trace / f"trace-{method.replace('+', '-')}.json.gz")
        Wire.bytes_per_second = None
    training.close()


def timed(steps: int, training: Any) -> dict[str, float]:
    """Measure steps, each waited for on its own, and as many in a row."""
    found = []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        training.step(1)
        synchronize()
        found.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(steps):
        training.step(1)
    synchronize()
    in_a_row = (time.perf_counter() - began) / steps
    return {"median": statistics.median(found), "least": min(found), "most": max(found), "in_a_row": in_a_row}


def arithmetic(steps: int, training: Any) -> float:
    """Return the median seconds of forward and backward without any exchange."""
    found = []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        with training.model.no_sync():
            training.forward_backward(1)
        synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def trace(training: Any, path: Path) -> None:
    """Profile two steps over the slowest link: the GPU's events alone, so that the file is small."""
    training.step(1)
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            training.step(1)
        synchronize()
    profile.export_chrome_trace(str(path))


if __name__ == "__main__":
    main()
