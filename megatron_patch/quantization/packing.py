"""Codes of 1 to 8 bits, packed into bytes, and scales in bf16.

Where p divides 8, 8/p codes share a byte, the first in its lowest bits. Codes of other widths are packed as
several planes of such, one behind the other: of 3 bits the lower two of all codes, then the highest of all.
A block's scale is rounded up, so that no code of the block leaves its range.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


@functools.cache
def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(lowest bit, width) of the planes of codes of `bits` bits: ((0, 2), (2, 1)) for 3."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))


def packed_bytes(size: int, bits: int) -> int:
    """Bytes that `size` codes take."""
    return sum(-(-size * width // 8) for _, width in planes(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest `bits` bits of int8 [n, S] -> uint8 [n, packed_bytes(S, bits)]; zeros fill a plane's last
    byte."""
    raw = codes.view(torch.uint8)
    return torch.cat([_pack(raw >> low, width) for low, width in planes(bits)], dim=1)


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """uint8 [n, packed_bytes(size, bits)] -> int8 [n, size], numbers from 0 on; 8 bits wrap to int8."""
    parts = packed.split([-(-size * width // 8) for _, width in planes(bits)], dim=1)
    codes = torch.zeros(packed.shape[0], size, dtype=torch.uint8, device=packed.device)
    for (low, width), part in zip(planes(bits), parts, strict=True):
        codes |= _unpack(part, width, size) << low
    return codes.view(torch.int8)


def _pack(raw: torch.Tensor, width: int) -> torch.Tensor:
    if width == 8:
        return raw
    count = 8 // width
    raw = F.pad(raw & ((1 << width) - 1), (0, -raw.shape[1] % count)).view(raw.shape[0], -1, count)
    packed = raw[..., 0].clone()
    for k in range(1, count):
        packed |= raw[..., k] << (k * width)
    return packed


def _unpack(packed: torch.Tensor, width: int, size: int) -> torch.Tensor:
    if width == 8:
        return packed
    shifts = torch.arange(8 // width, dtype=torch.uint8, device=packed.device) * width
    raw = (packed[..., None] >> shifts) & ((1 << width) - 1)
    return raw.view(packed.shape[0], -1)[:, :size]


BF16_NAN = 0x7FC0
"""The one bit pattern that a NaN scale has in a payload."""
_FP32_MAX = torch.finfo(torch.float32).max


@functools.cache
def largest_scale(levels: int) -> float:
    """The largest bf16 s for which levels*s is a finite fp32."""
    largest = torch.tensor(_FP32_MAX / levels, dtype=torch.float64, device="cpu")
    as_integer = largest.float().view(torch.int32)
    scale = (as_integer & -65536).view(torch.float32)
    return float(scale)


def over(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """values / divisor, each quotient rounded once: fp32 or fp64 of any shape.

    torch on CUDA multiplies by the reciprocal where the divisor is a Python number, or a tensor of one number
    on the CPU: two roundings.
    """
    if divisor == 1:
        return values
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def round_up_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """fp32 >= 0 -> the smallest bf16 not below it, as fp32 (any shape). NaN and Inf are not handled."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -65536).view(torch.float32)


def block_scales(wanted: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """The scales of blocks that want a step of `wanted`, for codes up to `levels`; all fp32 [n, blocks].

    `largest` is max|h| of each block. The result holds values that bf16 holds exactly: `wanted` rounded up,
    capped so that levels*s is finite, NaN for a block with a NaN or Inf.
    """
    finite = torch.isfinite(largest)
    scales = round_up_to_bf16(torch.where(finite, wanted, 0.0)).clamp(max=largest_scale(levels))
    return torch.where(finite, scales, torch.nan)


def normalizing(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two u and 1/u, normal numbers both, with 1 <= u * largest < 2; fp32 >= 0 of any shape.

    Below 2^-126 u is 2^126; from 2^127 on, and for NaN and Inf, it is 2^-126.
    """
    exponent = (largest.contiguous().view(torch.int32) & 0x7F800000).clamp(1 << 23, 253 << 23)
    return ((254 << 23) - exponent).view(torch.float32), exponent.view(torch.float32)
