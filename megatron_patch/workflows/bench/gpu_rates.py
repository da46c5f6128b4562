"""Measures the GPU kernels, compared with a copy on the same device in the same run.

The bytes that are counted are those that a kernel must move: gradient and error are read and error and
payload written, or payloads are read and the shard written. Inputs rotate, so that no call finds its data in
a cache, and several calls are launched in a row, because a launch can take as long as the kernel.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch import loco
from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import backends
from megatron_patch.quantization.codec import Codec, codec_of
from megatron_patch.quantization.layout import BlockLayout

SHARDS = 8  # `compress` cuts the bucket into this many shards.
_ROTATING = 3
_IN_A_ROW = 6


@dataclass(frozen=True)
class Line:
    """One measurement: the bytes that a call must move, and the median seconds of a call."""

    what: str
    bytes: int
    seconds: float


def copy(nbytes: int, device: torch.device, runs: int) -> Line:
    """Measure a copy of `nbytes` on the device; the bytes read and those written are counted."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Line("copy", 2 * nbytes, seconds_of(target.copy_, [source], device, runs))


def compress(
    config: CompressionConfig,
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
    runs: int,
    reference: bool = True,
) -> list[Line]:
    """Measure compressing a bucket by the fused kernel, and by the torch reference."""
    layout = BlockLayout.of(elements, SHARDS, config.bits, config.block_size)
    sender = Sender(config, layout, device)
    gradients = [torch.randn(elements, device=device).to(dtype) for _ in range(_ROTATING)]
    payload = torch.empty(SHARDS, layout.payload_bytes, dtype=torch.uint8, device=device)
    tensors, beta, moved = {}, 0.0, gradients[0].nbytes + payload.nbytes
    if sender.error is not None:
        tensors, beta = sender.error.tensors(), sender.error.beta
        moved += 2 * sender.error.nbytes
    ways: dict[str, Callable[[torch.Tensor], object]] = {}
    rest = (payload, sender.codec, layout, tensors, beta, None)  # No statistics, as in unlogged steps.
    fused = _fused(sender.codec, layout, device)
    if fused is not None:
        ways["triton"] = lambda g: fused.compress(g, *rest)
    if reference:
        ways["torch"] = lambda g: loco.compress(g, *rest)
    lines = []
    for what, way in ways.items():
        try:
            seconds = seconds_of(way, gradients, device, runs)
        except torch.OutOfMemoryError as failure:  # The reference holds about ten copies of the bucket.
            print(f"compress, {what}: {str(failure).splitlines()[0]}", file=sys.stderr)
            continue
        lines.append(Line(f"compress, {what}", moved, seconds))
    return lines


def decompress_reduce(
    config: CompressionConfig,
    elements: int,
    senders: int,
    dtype: torch.dtype,
    device: torch.device,
    runs: int,
) -> Line:
    """Measure averaging the payloads of `senders` into a shard of `elements`."""
    layout = BlockLayout.of(elements, 1, config.bits, config.block_size)
    received = [
        torch.randint(256, (senders, layout.payload_bytes), dtype=torch.uint8, device=device)
        for _ in range(_ROTATING)
    ]
    for payloads in received:
        payloads[:, layout.code_bytes :].view(torch.bfloat16).fill_(0.5)
    output = torch.empty(elements, dtype=dtype, device=device)
    codec = codec_of(config)
    run = _fused(codec, layout, device) or backends
    seconds = seconds_of(
        lambda payloads: run.decompress_reduce(payloads, codec, layout, output, senders),
        received,
        device,
        runs,
    )
    return Line(f"decompress_reduce, {senders} senders", received[0].nbytes + output.nbytes, seconds)


def measure(
    config: CompressionConfig,
    elements: int,
    dtype: torch.dtype,
    senders: int,
    runs: int,
    device: torch.device,
    reference: bool = True,
) -> dict[str, Any]:
    """Measure a GPU, with medians of `runs`; the result has the keys of cpu_rates.measure."""
    shard = elements // SHARDS
    lines = compress(config, elements, dtype, device, runs, reference)
    reduced = decompress_reduce(config, shard, senders, dtype, device, runs)
    yardstick = copy(4 * elements, device, runs)
    rates = {line.what.removeprefix("compress, "): elements / line.seconds for line in lines}
    return {
        "elements_per_second": {what.replace(".", "_"): rate for what, rate in rates.items()},
        "decompress_reduce_elements_per_second": shard * senders / reduced.seconds,
        "decompress_reduce_bytes_per_element": reduced.bytes / (shard * senders),
        "memcpy_bytes_per_second": yardstick.bytes / 2 / yardstick.seconds,
        "bytes_per_element": lines[0].bytes / elements,
        "call": "median",
        "kernels": backends.describe(device),
        **machine(device),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name, and the versions of the software that takes part in a measurement."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return {"device": platform.machine(), "versions": versions}
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    versions |= {"triton": triton.__version__, "cuda": torch.version.cuda or "", "driver": driver}
    return {"device": torch.cuda.get_device_name(device), "versions": versions}


def _fused(codec: Codec, layout: BlockLayout, device: torch.device) -> backends.Backend | None:
    """Return the Triton kernels, also on a CPU, where only Triton's interpreter can run them."""
    if device.type != "cpu":
        return backends.fused(codec, layout, device)
    from megatron_patch.quantization import triton_kernels

    return triton_kernels if triton_kernels.supports(codec, layout) else None


def seconds_of(
    call: Callable[[torch.Tensor], object], inputs: list[torch.Tensor], device: torch.device, runs: int
) -> float:
    """Return the median seconds of a call with each of `inputs` in turn; a GPU warms up for one round."""
    turns = itertools.cycle(inputs)

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_IN_A_ROW):
            call(next(turns))
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _IN_A_ROW

    def on_cpu() -> float:
        began = time.perf_counter()
        call(next(turns))
        return time.perf_counter() - began

    if device.type == "cpu":
        return statistics.median(on_cpu() for _ in range(runs))
    on_gpu()
    return statistics.median(on_gpu() for _ in range(runs))
