"""Lists the planner's numbers that come neither from the recipe nor from an option, with their sources.

A number of the kind "assumed" is a guess. Rates of kernels are those that `python -m benchmarks.gpu` measured
on the GPU; its files lie in benchmarks/gpu/results/, of which an installed wheel has a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.run import configuration


@dataclass(frozen=True)
class Constant:
    """A number, its unit, and where it comes from."""

    value: float
    unit: str
    kind: str
    """One of data sheet, measured, paper, computed, assumed."""
    source: str


_NCCL = "NCCL's own tuning table, src/graph/tuning.cc (commit 01afd20): ring, Simple protocol"
_H100 = "docs/benchmarks.md: instructions of the compiled kernel; no GPU has measured it"

# One row a number, as a table.
# fmt: off
CONSTANTS = {
    "mfu": Constant(0.40, "of peak", "paper",
        "Llama 3 on 8,192 to 16,384 H100: 38 to 43 % (arXiv 2407.21783, table 4); --mfu"),
    "tcp_headers": Constant(0.955, "of the rate", "measured",
        "docs/benchmarks.md: the most that TCP/IP's headers leave; --inter-gbit"),
    "intra_efficiency": Constant(0.78, "of NVLink", "paper",
        "NCCL's cap of 235 of A100's 300 GB/s, src/graph/tuning.cc (commit 01afd20)"),
    "inter_latency": Constant(9.6e-6, "s a step", "paper", f"{_NCCL}, network"),
    "intra_latency": Constant(3.4e-6, "s a step", "paper", f"{_NCCL}, NVLink"),
    "call_latency": Constant(8.4e-6, "s a call", "paper", f"{_NCCL}, base"),
    "peers_at_once": Constant(8, "peers", "assumed",
        "of an all-to-all between nodes, whose latencies overlap"),
    "compress": Constant(280e9, "elements/s", "computed", f"{_H100}; an H100"),
    "decompress": Constant(3.5e12, "codes/s", "computed", f"{_H100}; an H100, codes of all senders"),
    "weight_encode": Constant(125e9, "weights/s", "computed", f"{_H100}; an H100"),
    "weight_decode": Constant(231e9, "weights/s", "computed", f"{_H100}; an H100"),
    "weight_sums": Constant(1.5e12, "weights/s", "computed", f"{_H100}; an H100, bound by its memory"),
    "memory_share": Constant(0.70, "of memory rate", "computed",
        "docs/benchmarks.md: a copy moves 3.0 TB/s where an H100 has 3.35, and Adam's many streams less; "
        "assumed below that"),
    "optimizer_bytes": Constant(34, "bytes", "computed",
        "of an owned parameter: Adam reads gradient (4), weight and moments (12), writes them (12) and bf16 "
        "(2), and the gradient's norm reads it again (4)"),
    "momentum_bytes": Constant(20, "bytes", "computed",
        "of a parameter with 1-bit Adam, on every rank: norm's sketch reads the gradient (4), the own "
        "momentum is formed of it (12), the shared one is copied (4)"),
    "worth": Constant(0.03, "of a step", "assumed",
        "the least gain for which a setting is recommended; --worth"),
}
# fmt: on

EXACT_BITS = ((5e-5, 0.15), (5e-4, 0.56), (1.43e-3, 0.77), (4.29e-3, 1.24), (1.43e-2, 1.99), (1.5e-2, 2.07))
"""Pairs of (peak learning rate / the weights' initial standard deviation, measured bits per weight as sent,
with padding): means over a cosine of 600 steps to a tenth of the peak (docs/weight_gather.md)."""


def value(name: str) -> float:
    return CONSTANTS[name].value


def exact_bits(ratio: float) -> float:
    """Return the bits per weight of the exact gather at a peak learning rate of `ratio` times the weights'
    initial standard deviation.

    Between the pairs of EXACT_BITS it is linear in the logarithm of `ratio`, and below them it follows the
    first line. Above them, a doubling of `ratio` costs one bit. It is at most 16.
    """
    points = [(log2(x), bits) for x, bits in EXACT_BITS]
    at = log2(max(ratio, 1e-9))
    low, high = next((pair for pair in pairwise(points) if at < pair[1][0]), (points[-1], None))
    slope = 1.0 if high is None else (high[1] - low[1]) / (high[0] - low[0])
    return min(16.0, max(0.0, low[1] + slope * (at - low[0])))


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by NVIDIA's data sheet."""

    name: str
    tflops: float
    """Dense bf16 operations (V100: fp16), 10^12 per second."""
    memory_gbyte: float
    """Memory bandwidth, 10^9 bytes per second."""
    link_gbyte: float
    """Bandwidth to the other GPUs of its node by NVLink or PCIe, 10^9 bytes per second each way."""
    lanes: float
    """Multiprocessors x lanes x GHz, by which rates of kernels are scaled from an H100's."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989, 3350, 450, 132 * 128 * 1.7),  # SXM, as all that are not named PCIe.
        Gpu("H200", 989, 4800, 450, 132 * 128 * 1.7),
        Gpu("H800", 989, 3350, 200, 132 * 128 * 1.7),  # An H100 with 400 GB/s of NVLink.
        Gpu("B200", 2250, 7700, 900, 148 * 128 * 1.9),  # An eighth of a DGX B200.
        Gpu("A100", 312, 2039, 300, 108 * 64 * 1.41),
        Gpu("A100-40GB", 312, 1555, 300, 108 * 64 * 1.41),
        Gpu("H100-PCIe", 756, 2000, 64, 114 * 128 * 1.6),  # PCIe 5 x16.
        Gpu("A100-PCIe", 312, 1935, 32, 108 * 64 * 1.41),  # PCIe 4 x16.
        Gpu("L40S", 362, 864, 32, 142 * 128 * 2.2),  # PCIe 4 x16.
        Gpu("V100", 125, 900, 150, 80 * 64 * 1.53),
    )
}


def find(name: str) -> Gpu:
    """Return the GPU of that name, in any case of letters."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise UserError(f"--gpu: {name!r} must be one of {', '.join(GPUS)}{nearest(name, GPUS)}")


def _named(device: str) -> str | None:
    """Return the name in GPUS for CUDA's name of a GPU: the longest that is part of it."""
    words = device.lower()
    fitting = [name for name in GPUS if all(part.lower() in words for part in name.split("-"))]
    return max(fitting, key=len, default=None)


# --- numbers that `python -m benchmarks.gpu` measured -----------------------------------------------------

RESULTS = configuration.shipped("benchmarks/gpu/results")
_GRADIENTS, _WEIGHTS = "4 bits, levels, fp32", "weights, 0.00143"
RATES = {
    "compress": (_GRADIENTS, "compress"),
    "decompress": (_GRADIENTS, "decompress of 8"),
    "weight_encode": (_WEIGHTS, "encode"),
    "weight_decode": (_WEIGHTS, "decode"),
    "weight_sums": (_WEIGHTS, "sums"),
}
"""Where a results file has the rate of a kernel in CONSTANTS: the measurement, and its rate."""


def numbers_of(gpu: Gpu) -> dict[str, Constant]:
    """Return all of CONSTANTS as they are for a GPU.

    What was measured on it is marked so. Other rates of kernels are an H100's, scaled by instructions or
    memory, whichever is slower.
    """
    h100 = GPUS["H100"]
    speed = min(gpu.lanes / h100.lanes, gpu.memory_gbyte / h100.memory_gbyte)
    scaled = {name: dataclasses.replace(CONSTANTS[name], value=value(name) * speed) for name in RATES}
    results = newest(RESULTS).get(gpu.name)
    return CONSTANTS | scaled | (_measured(results, gpu) if results else {})


@functools.cache
def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the newest results of each kind of GPU, by its name in GPUS, the newest last.

    A GPU without a name there has CUDA's. Results of a CPU are none.
    """
    files = sorted(folder.glob("*.json"))
    every = [json.loads(file.read_text(encoding="utf-8")) | {"file": file.name} for file in files]
    of_gpus = [results for results in every if results["gpus"]]
    by_name: dict[str, dict[str, Any]] = {}
    for results in sorted(of_gpus, key=lambda results: str(results["date"])):
        name = _named(results["device"]) or results["device"]
        by_name.pop(name, None)
        by_name[name] = results
    return by_name


def _measured(results: dict[str, Any], gpu: Gpu) -> dict[str, Constant]:
    rates = results["parts"].get("rates", {}).get("rates", {})
    source = f"{results['device']}, {results['date']}: benchmarks/gpu/results/{results['file']}"
    values = {name: rates[what][rate] for name, (what, rate) in RATES.items() if what in rates}
    if bytes_per_second := rates.get("adam_bytes"):
        values["memory_share"] = bytes_per_second / (gpu.memory_gbyte * 1e9)
    return {
        name: dataclasses.replace(CONSTANTS[name], value=rate, kind="measured", source=source)
        for name, rate in values.items()
    }
