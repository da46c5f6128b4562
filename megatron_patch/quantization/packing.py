"""Codes of 8, 4, 2 or 1 bits, packed into bytes, and scales in bf16.

8/p codes of p bits share a byte, the first one in its lowest bits. A block's scale is rounded up, so that no
code of the block leaves its range.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the lowest `bits` bits of int8 [n, S] into uint8 [n, ceil(S * bits / 8)], filled with zeros."""
    raw = codes.view(torch.uint8)
    if bits == 8:
        return raw
    count = 8 // bits
    raw = F.pad(raw & ((1 << bits) - 1), (0, -raw.shape[1] % count)).view(raw.shape[0], -1, count)
    packed = raw[..., 0].clone()
    for k in range(1, count):
        packed |= raw[..., k] << (k * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack uint8 [n, ceil(size * bits / 8)] to unsigned codes in int8 [n, size]; 8 bits wrap to int8."""
    if bits == 8:
        return packed.view(torch.int8)
    shifts = torch.arange(8 // bits, dtype=torch.uint8, device=packed.device) * bits
    raw = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return raw.view(packed.shape[0], -1)[:, :size].view(torch.int8)


BF16_NAN = 0x7FC0
"""The bit pattern of every NaN scale in a payload."""
_FP32_MAX = torch.finfo(torch.float32).max


@functools.cache
def largest_scale(levels: int) -> float:
    """Return the largest bf16 s for which levels*s is a finite fp32."""
    largest = torch.tensor(_FP32_MAX / levels, dtype=torch.float64, device="cpu")
    as_integer = largest.float().view(torch.int32)
    scale = (as_integer & -65536).view(torch.float32)
    return float(scale)


def over(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return values / divisor, each quotient rounded once; fp32 or fp64 of any shape.

    If the divisor is a Python number or a CPU scalar, torch on CUDA multiplies by its reciprocal, which
    rounds twice.
    """
    if divisor == 1:
        return values
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def round_up_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 >= 0 of any shape up to bf16; the result is fp32. NaN and Inf are not handled."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -65536).view(torch.float32)


def block_scales(wanted: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the scales s of blocks, given the scales that they want; all are fp32 [n, blocks].

    The result is `wanted` rounded up to bf16, and at most so large that levels*s is finite. It is NaN for a
    block with a NaN or Inf, as `largest`, max|h| of each block, shows.
    """
    finite = torch.isfinite(largest)
    scales = round_up_to_bf16(torch.where(finite, wanted, 0.0)).clamp(max=largest_scale(levels))
    return torch.where(finite, scales, torch.nan)


def normalizing(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the power of two u for which 1 <= u * largest < 2, and 1/u; fp32 >= 0 of any shape.

    Both are normal numbers: u is 2^126 for `largest` below 2^-126, and 2^-126 from 2^127 on and for NaN, Inf.
    """
    exponent = (largest.contiguous().view(torch.int32) & 0x7F800000).clamp(1 << 23, 253 << 23)
    return ((254 << 23) - exponent).view(torch.float32), exponent.view(torch.float32)
