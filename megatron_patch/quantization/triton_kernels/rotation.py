"""Rotation of blocks in registers: quantization/rotation.py, bit for bit.

A thread has RUN neighbours of a block. Stages that pair them are additions; between threads each number
goes to its partner, and one fused multiply-add by +1 or -1, exact, adds or subtracts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron_patch.quantization import rotation

_SQRT_HALF = tl.constexpr(0x3F3504F3)  # bits of 2^-0.5 in fp32
_ONE = tl.constexpr(0x3F800000)


@functools.cache
def diagonal(block: int, whole: bool, device: torch.device) -> torch.Tensor:
    """fp32 [b] on a device: d of a whole block, or its signs alone."""
    scale = 2.0 ** (-(block.bit_length() - 1) / 2) if whole else 1.0
    return (rotation.signs(block) * torch.tensor(scale, dtype=torch.float32)).to(device)


@triton.jit
def parts_of(lengths, B: tl.constexpr):
    """[rows] -> int32 [rows, B]: its highest bit tells the part of each element; 0 behind a block's
    length."""
    place = tl.arange(0, B)[None, :]
    return tl.where(place < lengths[:, None], place ^ lengths[:, None], 0)


@triton.jit
def scaled(values, diagonal, parts, B: tl.constexpr, WHOLE: tl.constexpr):
    """d times fp32 [rows, B]; `diagonal` is a pointer to `diagonal(B, WHOLE)`."""
    d = tl.load(diagonal + tl.arange(0, B))[None, :]
    if WHOLE:
        return values * d
    exponent = (parts.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, 0)
    magnitude = tl.where(exponent % 2 == 0, _ONE, _SQRT_HALF) - ((exponent // 2) << 23)
    return values * (d * magnitude.to(tl.float32, bitcast=True))


@triton.jit
def hadamard(values, parts, B: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """H times each part of fp32 [rows, B]; `parts` is not read where every block is WHOLE."""
    rows: tl.constexpr = values.shape[0]
    for stage in tl.static_range(12):
        if 1 << stage < RUN:
            pairs = tl.reshape(values, (rows, B >> (stage + 1), 2, 1 << stage))
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            added = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (rows, B))
            values = added if WHOLE else tl.where(parts >> (stage + 1) != 0, added, values)
        elif 1 << stage < B:
            added = _between_threads(values, (1 << stage) // RUN, B, RUN)
            values = added if WHOLE else tl.where(parts >> (stage + 1) != 0, added, values)
    return values


@triton.jit
def _between_threads(values, distance: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):
    runs = tl.reshape(values, (values.shape[0], B // RUN, RUN))
    thread = tl.arange(0, B // RUN)[None, :, None]
    partner = tl.gather(runs, tl.broadcast_to(thread ^ distance, runs.shape), 1)
    sign = tl.where((thread & distance) == 0, 1.0, -1.0)
    added = tl.fma(runs, tl.broadcast_to(sign, runs.shape), partner)
    return tl.reshape(added, values.shape)
