"""Which code compresses: a fused kernel where the device has one, the torch reference where not.

A fused kernel is a module with the functions of quantization/native/__init__.py. Results are the same bits,
so that ranks may differ in what they run. MEGATRON_LOCO_KERNELS=torch takes the reference everywhere.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch

from megatron_patch.quantization import native, reference
from megatron_patch.quantization.blocks import BlockLayout

VARIABLE = "MEGATRON_LOCO_KERNELS"


def fused(device: torch.device) -> ModuleType | None:
    """The kernels of a device; None: the torch reference."""
    if os.environ.get(VARIABLE, "auto") == "torch":
        return None
    return native if device.type == "cpu" and native.variants() else None


def describe(device: torch.device) -> str:
    """The kernels of a device in words, for logs and `doctor`."""
    if fused(device) is native:
        return f"native ({native.variants()[-1]})"
    if device.type == "cpu" and not native.variants():
        return "torch reference: no compiler was there when the package was built (about 15 times slower)"
    return "torch reference"


def decompress_reduce(
    payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum N senders' payloads of one shard: reference.decompress_reduce, fused where possible."""
    kernels = fused(output.device)
    (kernels or reference).decompress_reduce(payloads, layout, output, divisor)


def decompress(payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor) -> None:
    """Decode one payload per shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    for index, part in enumerate(output.split(layout.shard_size)):
        decompress_reduce(payloads[index : index + 1], layout, part)
