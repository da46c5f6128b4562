"""Chooses a fused kernel if one supports the codec on the device, else the torch reference.

All give the same bits, so that ranks may run different ones. MEGATRON_LOCO_KERNELS=torch selects the
reference everywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from megatron_patch.errors import UserError
from megatron_patch.quantization import native
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.releases import refuse_old

VARIABLE = "MEGATRON_LOCO_KERNELS"
_SLOWER = " (some 30 times slower)"


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
        triton: Any = importlib.import_module("triton")
    except ImportError:
        return None
    refuse_old("triton", triton.__version__, f"install a newer one, or set {VARIABLE}=torch{_SLOWER}")
    return cast(Backend, importlib.import_module("megatron_patch.quantization.triton_kernels"))


@contextmanager
def explained() -> Iterator[None]:
    """Within the block, which tries GPU kernels, an error becomes a UserError that names a way out."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Triton's are of many kinds.
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"the GPU kernels do not compile on {torch.cuda.get_device_name()} with torch {torch.__version__}"
            f" and its Triton ({first}): set {VARIABLE}=torch{_SLOWER}"
        ) from error


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
    return f"torch reference: {missing}{_SLOWER}"
