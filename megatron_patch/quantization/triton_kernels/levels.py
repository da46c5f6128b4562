"""The arithmetic of the levels codec (quantization/levels.py, bit for bit).

Between floats and payload words a code is a number u >= 0 that grows with the level: HALF + i for the i-th
positive level, HALF - 1 - i for the i-th negative one. u is stored in the bits of a float, from bit 5 on,
with the exponent of 2^18. A polynomial of u - HALF + 1/2 is within 0.35 of the level, and is rounded to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.quantization.triton_kernels.float_bits import (
    as_int32,
    mean,
    packed,
    root,
    split_pairs,
    squares_of_four,
)

PLACE = tl.constexpr(5)
ONE = tl.constexpr(1 << 5)
EXPONENT = tl.constexpr((127 + 23 - 5) << 23)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number added to it is rounded to a whole number.


@triton.jit
def wanted_scale(near_one, inverse, lengths, step, WHOLE: tl.constexpr):
    """Return c * rms(h) of each row, fp32 [rows]; `near_one` is h / inverse, [rows, B]; `step` is c/64."""
    rows: tl.constexpr = near_one.shape[0]
    B: tl.constexpr = near_one.shape[1]
    v = tl.fma(tl.abs(near_one), tl.full(near_one.shape, 64.0, tl.float32), _WHOLE) - _WHOLE
    of_thread = tl.sum(tl.reshape(squares_of_four(v), (rows, B // 16, 4)), axis=2)
    if B <= 256:  # The sum is less than 2^24, so that it is exact in fp32.
        energy = tl.sum(of_thread, axis=1)
    else:
        energy = tl.sum(of_thread.to(tl.int32), axis=1)
    if WHOLE:
        square = energy.to(tl.float32) * (1.0 / B)
    else:
        square = mean(energy.to(tl.float64), tl.maximum(lengths, 1))
    return root(square) * step * inverse


@triton.jit
def encode(h, scale, BITS: tl.constexpr):
    """Quantize h, fp32 [rows, n], with the scales [rows]; returns the float bits that hold u, int32."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    magnitude = tl.abs(h)
    s = scale[:, None]
    if BITS == 4:
        high = magnitude > s * 24.5
        middle = magnitude > tl.where(high, s * 41.0, s * 12.0)
        last = tl.where(middle, tl.where(high, s * 53.5, s * 18.0), tl.where(high, s * 32.0, s * 6.0))
        number = tl.where(high, 4 * ONE, 0) + tl.where(middle, 2 * ONE, 0)
    else:
        last = tl.broadcast_to(s * 6.5, h.shape)
        number = tl.zeros(h.shape, tl.int32)
    number += tl.where(magnitude > last, 1 * ONE, 0) + (EXPONENT + HALF * ONE)
    negative = (h + 0.0).to(tl.int32, bitcast=True) >> 31  # Adding 0 makes -0 positive.
    return number ^ (negative & ((2 * HALF - 1) * ONE))


@triton.jit
def decode(held, at, BITS: tl.constexpr):
    """Return the levels, fp32, of int32 float bits that hold u at bit `at`, with the exponent of 2^(23 - at).

    `at` is from 5 to 20.
    """
    held = held.to(tl.float32, bitcast=True)
    exponent = ((127 + 23 - at) << 23).to(tl.float32, bitcast=True)
    if BITS == 2:
        slope = tl.full(held.shape, 6.625, tl.float32)
        return tl.fma(held, slope, (_WHOLE - 10) - exponent * 6.625) - _WHOLE
    x = tl.fma(held, tl.full(held.shape, 15 / 64, tl.float32), -(exponent + 7.5) * (15 / 64))
    square = x * x
    return tl.fma(x, tl.fma(square, square, 25.03), _WHOLE) - _WHOLE


@triton.jit
def words_of(held, BITS: tl.constexpr, WORD: tl.constexpr):
    """Pack int32 [rows, n] that hold u into words of codes: uint32 [rows, n * BITS / WORD]."""
    # The sum of the exponents is subtracted, which leaves 16 bits from bit 5 on.
    halves = packed(held, BITS, 16) - as_int32(EXPONENT * (0xFFFF // ((1 << BITS) - 1)))
    halves = halves.to(tl.uint32, bitcast=True)
    if WORD == 16:
        words = halves >> PLACE
    else:
        low, high = split_pairs(halves)
        words = (low >> PLACE) + (high << (16 - PLACE))
    return _with_signs(words, ~words, BITS)


@triton.jit
def from_wire(words, BITS: tl.constexpr):
    """Convert words of codes, each a sign and a level's number, to words of u; uint32."""
    return _with_signs(words, words, BITS)


@triton.jit
def _with_signs(words, negative, BITS: tl.constexpr):
    """Flip the sign of every code, and reverse the order of the numbers of those that are `negative`."""
    SIGNS: tl.constexpr = (1 << (BITS - 1)) * (0xFFFFFFFF // ((1 << BITS) - 1))
    negative = negative & SIGNS
    return words ^ SIGNS ^ (negative - (negative >> (BITS - 1)))
