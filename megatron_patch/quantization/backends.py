"""Chooses a fused kernel if one supports the codec on the device, else the torch reference.

All give the same bits, so that ranks may run different ones. MEGATRON_LOCO_KERNELS=torch selects the
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
    """A module of fused kernels, with the functions that quantization/native/__init__.py describes.

    It may also have `decompress` (loco.py), which decodes all shards in one launch.
    """

    __name__: str

    def supports(self, codec: Codec, layout: BlockLayout) -> bool:
        """Whether the kernels support this codec with this layout."""
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
    """Return the kernels for `codec`, `layout` and `device`; None: use the torch reference."""
    kernels = available(device)
    return kernels if kernels is not None and kernels.supports(codec, layout) else None


def available(device: torch.device) -> Backend | None:
    """Return the kernels for `device`; None: use the torch reference."""
    if os.environ.get(VARIABLE, "auto") == "torch":
        return None
    if device.type == "cpu":
        return native if native.variants() else None
    return _triton() if device.type == "cuda" else None


@functools.cache
def _triton() -> Backend | None:
    # Importing Triton takes a while, so it is imported only if a GPU is used.
    try:
        module = importlib.import_module("megatron_patch.quantization.triton_kernels")
    except ImportError:
        return None
    return cast(Backend, module)


def describe(device: torch.device) -> str:
    """Name the kernels for `device`, for logs and `doctor`."""
    kernels = available(device)
    if kernels is native:
        return f"native ({native.variants()[-1]})"
    if kernels is not None:
        return "triton"
    if os.environ.get(VARIABLE, "auto") == "torch":
        return f"torch reference ({VARIABLE} asks for it)"
    missing = "no compiler was there when the package was built" if device.type == "cpu" else "no Triton"
    return f"torch reference: {missing} (some 30 times slower)"
