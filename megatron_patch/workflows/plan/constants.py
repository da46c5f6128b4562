"""Lists every number of the planner that comes neither from the recipe nor the cluster, with its source.

`megatron-loco plan --explain` shows this table and the GPUs'. A number with the source "assumed" is a guess:
measure it with `bench links`, `bench kernels`, or give it by a flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log2

from megatron_patch.errors import UserError, nearest


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

CONSTANTS = {
    "mfu": Constant(
        0.40,
        "of peak",
        "paper",
        "Llama 3 on 8,192 to 16,384 H100: 38 to 43 % (arXiv 2407.21783, table 4); --mfu",
    ),
    "tcp_headers": Constant(
        0.955,
        "of the rate",
        "measured",
        "docs/benchmarks.md: the most that TCP/IP's headers leave; --inter-gbit",
    ),
    "intra_efficiency": Constant(
        0.78,
        "of NVLink",
        "paper",
        "NCCL's cap of 235 of A100's 300 GB/s, src/graph/tuning.cc (commit 01afd20)",
    ),
    "inter_latency": Constant(9.6e-6, "s a step", "paper", f"{_NCCL}, network"),
    "intra_latency": Constant(3.4e-6, "s a step", "paper", f"{_NCCL}, NVLink"),
    "call_latency": Constant(8.4e-6, "s a call", "paper", f"{_NCCL}, base"),
    "peers_at_once": Constant(
        8,
        "peers",
        "assumed",
        "of an all-to-all between nodes, whose latencies overlap; bench links measures it",
    ),
    "compress": Constant(280e9, "elements/s", "computed", f"{_H100}; an H100, --compress-rate"),
    "decompress": Constant(3.5e12, "codes/s", "computed", f"{_H100}; an H100, codes of all senders"),
    "weight_encode": Constant(125e9, "weights/s", "computed", f"{_H100}; an H100"),
    "weight_decode": Constant(231e9, "weights/s", "computed", f"{_H100}; an H100"),
    "weight_sums": Constant(1.5e12, "weights/s", "computed", f"{_H100}; an H100, bound by its memory"),
    "memory_share": Constant(
        0.70,
        "of memory rate",
        "computed",
        "docs/benchmarks.md: a copy moves 3.0 TB/s where an H100 has 3.35, "
        "and Adam's many streams less; assumed below that",
    ),
    "optimizer_bytes": Constant(
        34,
        "bytes",
        "computed",
        "of an owned parameter: Adam reads gradient (4), weight and moments (12), writes "
        "them (12) and bf16 (2), and the gradient's norm reads it again (4)",
    ),
    "momentum_bytes": Constant(
        20,
        "bytes",
        "computed",
        "of a parameter with 1-bit Adam, on every rank: norm's sketch reads the gradient (4), "
        "the own momentum is formed of it (12), the shared one is copied (4)",
    ),
    "cpu_compress": Constant(
        703e6, "elements/s", "measured", "docs/benchmarks.md: 4 bits, one core with AVX2"
    ),
    "cpu_decompress": Constant(5.5e9, "codes/s", "measured", "docs/benchmarks.md: one core with AVX2"),
    "cpu_weight_encode": Constant(0.5e9, "weights/s", "measured", "docs/weight_code.md: one core, AVX2"),
    "cpu_weight_decode": Constant(0.75e9, "weights/s", "measured", "docs/weight_code.md: one core, AVX2"),
    "cpu_weight_sums": Constant(6e9, "weights/s", "computed", "docs/benchmarks.md: memcpy of 12.65 GB/s"),
    "cpu_optimizer": Constant(174e6, "parameters/s", "measured", "docs/plan.md: torch's Adam, one core"),
    "activation_reserve": Constant(
        0.90,
        "of memory",
        "assumed",
        "what NCCL, the allocator's fragments and kernels leave (docs/clusters.md)",
    ),
    "worth": Constant(
        0.03, "of a step", "assumed", "the least gain for which a setting is recommended; --worth"
    ),
}

EXACT_BITS = ((5e-5, 0.15), (5e-4, 0.56), (1.43e-3, 0.77), (4.29e-3, 1.24), (1.43e-2, 1.99), (1.5e-2, 2.07))
"""Pairs of (peak learning rate / the weights' initial standard deviation, measured bits per weight as sent,
with padding): means over a cosine of 600 steps to a tenth of the peak (docs/weight_gather.md)."""

EXACT_SOURCE = (
    "docs/weight_gather.md: means over a cosine of 600 steps, by peak rate / weights' std. deviation"
)


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
    """One kind of GPU."""

    name: str
    tflops: float
    """Dense bf16 operations (V100: fp16), 10^12 per second."""
    memory_gb: float
    memory_gbyte: float
    """Memory bandwidth, 10^9 bytes per second."""
    link_gbyte: float
    """Bandwidth to the other GPUs of its node by NVLink or PCIe, 10^9 bytes per second each way."""
    lanes: float
    """Multiprocessors x lanes x GHz, by which rates of kernels are scaled from an H100's."""
    source: str


_SHEET = "NVIDIA's data sheet"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989, 80, 3350, 450, 132 * 128 * 1.7, f"{_SHEET}, H100 SXM"),
        Gpu("H200", 989, 141, 4800, 450, 132 * 128 * 1.7, f"{_SHEET}, H200 SXM"),
        Gpu(
            "H800",
            989,
            80,
            3350,
            200,
            132 * 128 * 1.7,
            f"{_SHEET}, H800 SXM: an H100 with 400 GB/s of NVLink",
        ),
        Gpu("B200", 2250, 180, 7700, 900, 148 * 128 * 1.9, f"{_SHEET}, DGX B200 / 8"),
        Gpu("A100", 312, 80, 2039, 300, 108 * 64 * 1.41, f"{_SHEET}, A100 SXM 80 GB"),
        Gpu("A100-40GB", 312, 40, 1555, 300, 108 * 64 * 1.41, f"{_SHEET}, A100 SXM 40 GB"),
        Gpu("H100-PCIe", 756, 80, 2000, 64, 114 * 128 * 1.6, f"{_SHEET}, H100 PCIe, PCIe 5 x16"),
        Gpu("A100-PCIe", 312, 80, 1935, 32, 108 * 64 * 1.41, f"{_SHEET}, A100 PCIe 80 GB, PCIe 4 x16"),
        Gpu("L40S", 362, 48, 864, 32, 142 * 128 * 2.2, f"{_SHEET}, L40S, PCIe 4 x16"),
        Gpu("V100", 125, 32, 900, 150, 80 * 64 * 1.53, f"{_SHEET}, V100 SXM2 32 GB, fp16"),
    )
}


def named(device: str) -> str | None:
    """Return the name in GPUS for CUDA's name of a GPU: the longest that is part of it."""
    words = device.lower()
    found = [name for name in GPUS if all(part.lower() in words for part in name.split("-"))]
    return max(found, key=len, default=None)


def find(name: str) -> Gpu:
    """Return the GPU of that name, in any case of letters."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise UserError(f"--gpu: {name!r} must be one of {', '.join(GPUS)}{nearest(name, GPUS)}")
