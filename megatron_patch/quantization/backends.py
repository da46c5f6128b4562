"""Which code compresses: a fused kernel where the device has one, the torch reference where not.

A fused kernel is a module with the functions of quantization/native/__init__.py. Results are the same bits,
so that ranks may differ in what they run. MEGATRON_LOCO_KERNELS=torch takes the reference everywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

from megatron_patch.quantization import native, reference
from megatron_patch.quantization.layout import BlockLayout

VARIABLE = "MEGATRON_LOCO_KERNELS"


def fused(device: torch.device, layout: BlockLayout | None = None) -> ModuleType | None:
    """The kernels for buckets cut by `layout` on a device; None: the torch reference."""
    if os.environ.get(VARIABLE, "auto") == "torch":
        return None
    if device.type == "cpu":
        return native if native.variants() else None
    kernels = _triton() if device.type == "cuda" else None
    return kernels if kernels is not None and (layout is None or kernels.supports(layout)) else None


@functools.cache
def _triton() -> ModuleType | None:
    # Imported where a GPU is used only: Triton takes a while.
    try:
        return importlib.import_module("megatron_patch.quantization.triton_kernels")
    except ImportError:
        return None


def describe(device: torch.device) -> str:
    """The kernels of a device in words, for logs and `doctor`."""
    kernels = fused(device)
    if kernels is native:
        return f"native ({native.variants()[-1]})"
    if kernels is not None:
        return "triton"
    if os.environ.get(VARIABLE, "auto") == "torch":
        return f"torch reference ({VARIABLE} asks for it)"
    missing = "no compiler was there when the package was built" if device.type == "cpu" else "no Triton"
    return f"torch reference: {missing} (some 30 times slower)"


def decompress_reduce(
    payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum N senders' payloads of one shard: reference.decompress_reduce, fused where possible."""
    kernels = fused(output.device, layout)
    (kernels or reference).decompress_reduce(payloads, layout, output, divisor)


def decompress(payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor) -> None:
    """Decode one payload per shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    for index, part in enumerate(output.split(layout.shard_size)):
        decompress_reduce(payloads[index : index + 1], layout, part)
