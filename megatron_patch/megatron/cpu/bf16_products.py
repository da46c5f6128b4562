"""Computes bf16 matrix products in fp32, and rounds them to bf16, on processors without bf16 instructions.

On every device a bf16 product is a sum in fp32 that is rounded once; only the order of the sum differs here.
Without AVX512_BF16 or AMX, oneDNN's own bf16 product takes 4 to 28 times as long as the fp32 product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mm.out", "bmm.out")
_installed: list[Any] = []


def needed() -> bool:
    """Whether this processor computes bf16 products slowly and the installed torch can replace them."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return not fast and hasattr(torch.library, "get_kernel")


def install() -> None:
    """Replace the CPU's bf16 products until `uninstall`. Idempotent."""
    if _installed:
        return
    library = torch.library.Library("aten", "IMPL")
    for name in _PRODUCTS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, _in_fp32(kernel), "CPU", with_keyset=True)
    _installed.append(library)


def uninstall() -> None:
    """Restore torch's own products."""
    for library in _installed:
        library._destroy()
    _installed.clear()


def _in_fp32(kernel: Any) -> Callable[..., torch.Tensor]:
    def product(keys: Any, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        if tensors[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *tensors, **options)
        wide = (tensor.float() for tensor in tensors)
        if (out := options.get("out")) is None:
            return kernel.call_boxed(keys, *wide, **options).to(torch.bfloat16)
        return out.copy_(kernel.call_boxed(keys, *wide, out=torch.empty_like(out, dtype=torch.float32)))

    return product
