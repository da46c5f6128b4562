"""Measures how long the host takes to launch one bucket's exchange: Python, torch and Triton, without a GPU.

    python benchmarks/kernels/host_time.py

The exchange runs over torch's fake process group of 16 ranks, on small CPU tensors. Triton compiles its
kernels for an H100 and does all of a launch but the driver's call; a collective is only its Python code and
dispatch. torch's own operations run on the CPU instead of being launched. Times are medians of one thread.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from megatron_patch.collectives.exchange import Setup
from megatron_patch.collectives.makers import make_reduce_scatters
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import backends, triton_kernels
from megatron_patch.quantization.blocks import Contents, Span

RANKS = 16
CPU = torch.device("cpu")
MATRIX = Contents(1 << 16, (Span.of(0, (128, 512)),))
LAYER = Contents(1 << 16, (Span.of(0, (512,), exact=True), Span.of(512, (127, 512))))


class Hopper:
    """The driver of an H100, as far as Triton asks for it before it launches a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def all_but_the_launch() -> None:
    """Have Triton's launches end before the driver's call."""

    def nothing_to_load(self: CompiledKernel) -> None:
        self._run = lambda *args: None

    CompiledKernel._init_handles = nothing_to_load
    triton.runtime.driver.set_active(Hopper())
    backends.available = lambda device: triton_kernels


def exchange_of(contents: Contents, config: CompressionConfig) -> Any:
    setup = Setup(config, Workspace(CPU))
    assert dist.group.WORLD is not None
    (exchange,) = make_reduce_scatters([contents], dist.group.WORLD, setup).exchanges
    return exchange


def microseconds(contents: Contents, config: CompressionConfig, runs: int) -> tuple[float, float]:
    """Return the median host time of `start` and of `wait` of a bucket's exchange."""
    exchange = exchange_of(contents, config)
    gradient, shard = torch.zeros(contents.numel), torch.zeros(contents.numel // RANKS)
    begun, ended = [], []
    with torch.no_grad():
        for _ in range(runs + 20):
            at = time.perf_counter()
            handle = exchange.start(gradient, shard, True)
            then = time.perf_counter()
            handle.wait()
            begun.append(then - at)
            ended.append(time.perf_counter() - then)
    return tuple(1e6 * statistics.median(times[20:]) for times in (begun, ended))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_but_the_launch()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    config = CompressionConfig(method="loco", topology="flat")
    for name, contents in (("a matrix", MATRIX), ("a layer, with norms", LAYER)):
        start, wait = microseconds(contents, config, args.runs)
        print(f"{name}: start {start:.0f} us, wait {wait:.0f} us, together {start + wait:.0f} us")
    if args.profile:
        profiler = cProfile.Profile()
        profiler.runcall(microseconds, LAYER, config, args.runs)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
