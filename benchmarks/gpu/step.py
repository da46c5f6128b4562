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
from benchmarks.gpu.part import ON_GPU, attempt, remains, synchronize, tell
from benchmarks.gpu.twin_group import TwinsRead, Wire
from benchmarks.network.llama import Llama
from megatron_patch.megatron import doors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="350m", choices=model.SHAPES)
    parser.add_argument("--ranks", type=int, default=8, help="of which one is real, without torchrun")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--links", default="none,400,100,25", help="Gbit/s of a rank, each way")
    parser.add_argument("--methods", default=";".join(model.METHODS))
    parser.add_argument("--trace", type=Path, help="folder for profiles of stock and of the exact gather")
    args = parser.parse_args()
    twins = TwinsRead() if os.environ.get("WORLD_SIZE", "1") == "1" else None
    links: dict[str, float | None] = {"its own links": None}
    if twins is None:
        start_ranks()
    else:
        model.one_of(args.ranks)
        given = [link for link in args.links.split(",") if link != "none"]
        links = {"no link": None} | {f"{link} Gbit/s": float(link) / 8e-9 for link in given}
        if ON_GPU:
            seconds = Wire.seconds_of_5_ms()
            tell(wire_seconds=seconds, checks={"a link of 5 ms takes 5 ms": 4.9e-3 < seconds < 5.3e-3})
    llama = model.SHAPES[args.model]
    of = {"model": args.model, "parameters": llama.parameters, "ranks": dist.get_world_size()}
    tell(**of, backend=dist.get_backend(), connections=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    for method in args.methods.split(";"):
        if remains() > 10:
            attempt(method, measure, method, llama, args, links, twins)
        else:
            tell(checks={f"{method}: there is time for it": False})
        tidy()
    # Last, since the profiler stays loaded.
    for method in ("stock", "loco+exact") if args.trace and ON_GPU else ():
        if remains() > 10:
            Wire.bytes_per_second = list(links.values())[-1]
            attempt(f"trace, {method}", trace, llama, method, args.trace)
        tidy()


def tidy() -> None:
    """Have nothing left of a method."""
    doors.disable()
    Wire.bytes_per_second = None
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def start_ranks() -> None:
    """Join the other ranks: over NCCL if each has a GPU, else over gloo."""
    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    own = torch.cuda.device_count() >= ranks_here
    if ON_GPU:
        torch.cuda.set_device(local if own else 0)
    dist.init_process_group("nccl" if own else "gloo")


def measure(method: str, llama: Llama, args: Any, links: dict[str, Any], twins: TwinsRead | None) -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    training = model.megatron(llama, method)
    if twins is not None:
        twins.checks, twins.decoded, twins.wrong = True, 0, 0
    losses = []
    for _ in range(3):
        training.step(1)
        losses.append(float(training.losses[0]["loss"]))
    checks = {f"{method}: losses are finite": all(abs(loss) < 1e9 for loss in losses)}
    if twins is not None:
        twins.checks = False
        if method.endswith("exact"):
            checks[f"{method}: decoded shards are the sender's"] = twins.decoded > 0 and not twins.wrong
    found: dict[str, Any] = {"losses": losses, "ready_seconds": time.monotonic() - began}
    if ON_GPU:
        found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    tell(methods={method: found}, checks=checks)
    for name, rate in links.items():
        Wire.bytes_per_second, Wire.sent = rate, 0.0
        training.step(1)
        sent = {} if twins is None else {"sent_bytes": Wire.sent}
        times = timed(args.steps, training.step, twins is not None)
        of = {"gradient_bytes": training.gradient_bytes, "weight_bytes": training.weight_bytes}
        tell(methods={method: {name: times | of | sent}})
    training.close()


def timed(steps: int, run: Any, alone: bool) -> dict[str, float]:
    """Measure steps, each waited for; a rank that is alone takes only two if they are long."""
    found: list[float] = []
    while len(found) < min(steps, 2) or (len(found) < steps and not (alone and sum(found) > 2)):
        synchronize()
        began = time.perf_counter()
        run(1)
        synchronize()
        found.append(time.perf_counter() - began)
    return {"median": statistics.median(found), "least": min(found), "most": max(found), "steps": len(found)}


def trace(llama: Llama, method: str, folder: Path) -> None:
    """Profile two steps over the slowest link: the GPU's events alone, so that the file is small."""
    training = model.megatron(llama, method)
    for _ in range(2):
        training.step(1)
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            training.step(1)
        synchronize()
    profile.export_chrome_trace(str(folder / f"trace-{method.replace('+', '-')}.json.gz"))
    training.close()


if __name__ == "__main__":
    main()
