"""GPUs by name: what their data sheets say, dense bf16, one direction of NVLink."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.errors import UserError, nearest


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    tflops: float
    """Dense bf16 (V100: fp16), 10^12 operations a second."""
    memory_gb: float
    memory_gbyte: float
    """10^9 bytes of memory a second."""
    link_gbyte: float
    """To the others of its node, 10^9 bytes a second each way: NVLink, or PCIe."""
    lanes: float
    """Multiprocessors x lanes x GHz: instruction rate, beside an H100's for the kernels' rates."""
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


def find(name: str) -> Gpu:
    """The GPU of that name."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise UserError(f"--gpu: {name!r} must be one of {', '.join(GPUS)}{nearest(name, GPUS)}")
