"""A block's scale: a bf16 number, rounded up, so that no code of the block leaves its range."""

from __future__ import annotations

import functools

import torch

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
