"""The CPU kernels: kernels.cpp, compiled when the package is built (hatch_build.py), called through ctypes.

`compress` and `decompress_reduce` do in one pass over memory what loco.py does in some twenty, bit for bit.
The library has a variant of the code for each instruction set (baseline, AVX2, AVX-512); the widest that the
processor supports runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_patch.quantization.blocks import word_bytes
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import signs
from megatron_patch.registry import OWN_CODECS

LIBRARY = Path(__file__).with_name("libmegatron_loco.so")

_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}
_NAMES = {name: number for number, name in enumerate(OWN_CODECS)}
"""The numbers of the codecs in kernels.h (CodecName). The kernels have all bits of each, rotated or not."""


_LAYOUT = ("numel", "shards", "shard_size", "bits", "block", "blocks", "code_bytes", "payload_bytes")


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _LAYOUT),
        ("word_bytes", ctypes.c_int64),
        ("places", ctypes.c_void_p),
    )


class _CompressArguments(ctypes.Structure):
    _fields_ = (
        ("layout", _Layout),
        ("codec", ctypes.c_int64),
        ("signs", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("gradient_type", ctypes.c_int64),
        ("error", ctypes.c_void_p),
        ("error_scales", ctypes.c_void_p),
        ("error_type", ctypes.c_int64),
        ("old_weight", ctypes.c_float),
        ("new_weight", ctypes.c_float),
        ("payload", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
    )


class _DecompressArguments(ctypes.Structure):
    _fields_ = (
        ("layout", _Layout),
        ("codec", ctypes.c_int64),
        ("signs", ctypes.c_void_p),
        ("payloads", ctypes.c_void_p),
        ("senders", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("output_type", ctypes.c_int64),
        ("divisor", ctypes.c_float),
    )


_WEIGHT_CALLS = {
    "megatron_loco_weight_encode": (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "megatron_loco_weight_decode": (ctypes.c_int, *[ctypes.c_void_p, ctypes.c_int64] * 2),
    "megatron_loco_weight_sums": (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
}


@functools.cache
def variants() -> tuple[str, ...]:
    """Return the instruction sets that this processor can run, the fastest last; none without a library."""
    library = _library()
    if library is None:
        return ()
    count = library.megatron_loco_variants()
    return tuple(library.megatron_loco_variant_name(index).decode() for index in range(count))


def supports(codec: Codec, layout: BlockLayout) -> bool:
    """Whether the kernels support a codec; every layout is supported."""
    return codec.name in _NAMES


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    statistics: torch.Tensor | None,
) -> None:
    """Compress one bucket and update its error state, as loco.compress.

    Args:
        gradient: [B] of fp32, bf16 or fp16.
        payload: uint8, contiguous: the payloads of all shards, end to end (`layout.payload_starts`). Codes
            and scales are written; exact elements (exact.py) are not.
        codec: a codec for which `supports` is true.
        layout: the bucket's layout.
        error: MovingAverageError.tensors(), updated in place; empty without error feedback.
        beta: the weight of the old error.
        statistics: fp64 [5], into which loco.STATISTICS are written; None if they are not needed.
    """
    values = error.get("codes", error.get("values"))
    scales = error.get("scales")
    arguments = _CompressArguments(
        layout=_layout(layout),
        codec=_NAMES[codec.name],
        signs=pointer(signs(layout.block)) if codec.rotation.sender else None,
        gradient=pointer(gradient),
        gradient_type=_FLOATS[gradient.dtype],
        error=None if values is None else pointer(values),
        error_scales=None if scales is None else pointer(scales),
        error_type=0 if values is None else _ERRORS[values.dtype],
        old_weight=beta,
        new_weight=1 - beta,
        payload=pointer(payload),
        starts=pointer(layout.payload_starts),
        statistics=None if statistics is None else pointer(statistics),
    )
    loaded().megatron_loco_compress(variant(), ctypes.byref(arguments))


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum the senders' payloads of one shard, as loco.decompress_reduce."""
    arguments = _DecompressArguments(
        layout=_layout(layout),
        codec=_NAMES[codec.name],
        signs=pointer(signs(layout.block)) if codec.rotation.owner else None,
        payloads=pointer(payloads),
        senders=payloads.shape[0],
        output=pointer(output),
        length=min(output.numel(), layout.shard_size),
        output_type=_FLOATS[output.dtype],
        divisor=divisor,
    )
    loaded().megatron_loco_decompress_reduce(variant(), ctypes.byref(arguments))


@contextmanager
def using(index: int) -> Iterator[None]:
    """Run `variants()[index]` instead of the fastest variant, for tests and benchmarks."""
    global _chosen
    before, _chosen = _chosen, index
    try:
        yield
    finally:
        _chosen = before


_chosen: int | None = None


def variant() -> int:
    """Return the index in `variants()` of the variant that runs."""
    return len(variants()) - 1 if _chosen is None else _chosen


@functools.cache
def _library() -> ctypes.CDLL | None:
    if not LIBRARY.is_file():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:  # It was compiled for another kind of machine.
        return None
    library.megatron_loco_variant_name.restype = ctypes.c_char_p
    for name, arguments in _WEIGHT_CALLS.items():
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, ctypes.c_int64
    return library


def loaded() -> ctypes.CDLL:
    """Return the library, which must exist: `variants()` is not empty."""
    library = _library()
    assert library is not None, "ask variants() first"
    return library


def _layout(layout: BlockLayout) -> _Layout:
    width = word_bytes(layout.block, layout.bits)
    return _Layout(*(getattr(layout, name) for name in _LAYOUT), width, pointer(layout.table.places))


def pointer(tensor: torch.Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
