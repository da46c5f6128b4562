"""Chooses a fused kernel where one supports the codec on the device, else the torch reference.

Results are the same bits, so that ranks may differ in what they run. MEGATRON_LOCO_KERNELS=torch takes the
reference everywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Protocol, cast

import torch

from megatron_patch.quantization import native
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout

VARIABLE = "MEGATRON_LOCO_KERNELS"


class Backend(Protocol):
    """Fused kernels: the functions of quantization/native/__init__.py, where they are described.

    `decompress`, of all shards in one launch (loco.py), may be among them.
    """

    __name__: str

    def supports(self, codec: Codec, layout: BlockLayout) -> bool:
        """Whether the kernels support the codec for this cut; else the torch reference is used."""
        ...

    def compress(
        self,
        gradient: torch.Tensor,
        payload: torch.Tensor,
        codec: Codec,
        layout: BlockLayout,
        error: Mapping[str, torch.Tensor],
        beta: float,
        statistics: torch.Tensor | None,
    ) -> None: ...

    def decompress_reduce(
        self,
        payloads: torch.Tensor,
        codec: Codec,
        layout: BlockLayout,
        output: torch.Tensor,
        divisor: int = 1,
    ) -> None: ...


def fused(codec: Codec, layout: BlockLayout, device: torch.device) -> Backend | None:
    """The kernels for buckets of `layout` in `codec` on a device; None: the torch reference."""
    kernels = available(device)
    return kernels if kernels is not None and kernels.supports(codec, layout) else None


def available(device: torch.device) -> Backend | None:
    """The kernels of a device; None: the torch reference."""
    if os.environ.get(VARIABLE, "auto") == "torch":
        return None
    if device.type == "cpu":
        return native if native.variants() else None
    return _triton() if device.type == "cuda" else None


@functools.cache
def _triton() -> Backend | None:
    # Imported where a GPU is used only: Triton takes a while.
    try:
        module = importlib.import_module("megatron_patch.quantization.triton_kernels")
    except ImportError:
        return None
    return cast(Backend, module)


def describe(device: torch.device) -> str:
    """The kernels of a device in words, for logs and `doctor`."""
    kernels = available(device)
    if kernels is native:
        return f"native ({native.variants()[-1]})"
    if kernels is not None:
        return "triton"
    if os.environ.get(VARIABLE, "auto") == "torch":
        return f"torch reference ({VARIABLE} asks for it)"
    missing = "no compiler was there when the package was built" if device.type == "cpu" else "no Triton"
    return f"torch reference: {missing} (some 30 times slower)"
