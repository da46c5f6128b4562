"""The arithmetic of the levels codec (quantization/levels.py, bit for bit), and the planes of 3-bit codes.

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
    elif BITS == 3:
        high = magnitude > s * 12.5
        last = tl.where(high, s * 21.0, s * 6.0)
        number = tl.where(high, 2 * ONE, 0)
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
    unit: tl.constexpr = 15 / 64 if BITS == 4 else 17 / 32
    zero = (exponent + ((1 << (BITS - 1)) - 0.5)) * unit
    x = tl.fma(held, tl.full(held.shape, unit, tl.float32), -zero)
    square = x * x
    if BITS == 4:
        slope = tl.fma(square, square, 25.03)
    else:
        slope = square + 10.447
    return tl.fma(x, slope, _WHOLE) - _WHOLE


@triton.jit
def words_of(held, BITS: tl.constexpr, FIELD: tl.constexpr, WORD: tl.constexpr):
    """Pack int32 [rows, n] that hold u into words of codes in fields: uint32 [rows, n * FIELD / WORD]."""
    # The sum of the exponents is subtracted, which leaves 16 bits from bit 5 on.
    halves = packed(held, FIELD, 16) - as_int32(EXPONENT * (0xFFFF // ((1 << FIELD) - 1)))
    halves = halves.to(tl.uint32, bitcast=True)
    if WORD == 16:
        words = halves >> PLACE
    else:
        low, high = split_pairs(halves)
        words = (low >> PLACE) + (high << (16 - PLACE))
    return _with_signs(words, ~words, BITS, FIELD)


@triton.jit
def from_wire(words, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Convert words of codes, each a sign and a level's number, to words of u; uint32."""
    return _with_signs(words, words, BITS, FIELD)


@triton.jit
def _with_signs(words, negative, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Flip the sign of every code, and reverse the order of the numbers of those that are `negative`."""
    SIGNS: tl.constexpr = (1 << (BITS - 1)) * (0xFFFFFFFF // ((1 << FIELD) - 1))
    negative = negative & SIGNS
    return words ^ SIGNS ^ (negative - (negative >> (BITS - 1)))


# Codes of 3 bits are sent as a plane of 2 bits and a plane of 1 bit (packing.py). Between planes and floats
# they are in words of 4 bits per code, with even and odd codes in different words:
#
#     even  0 p b b  of codes 0, 2, 4 ...      low   b b  of codes 0, 1, 2 ...
#     odd   0 p b b  of codes 1, 3, 5 ...      high  p    of codes 0, 1, 2 ...


@triton.jit
def to_planes(even, odd):
    """Convert two words of 8 codes to a word of the 16 lower two bits and a word of the 16 highest bits."""
    low = (even & 0x33333333) | ((odd & 0x33333333) << 2)
    high = ((even >> 2) & 0x11111111) | (odd & 0x44444444)
    high = (high | (high >> 1)) & 0x33333333
    high = (high | (high >> 2)) & 0x0F0F0F0F
    high = (high | (high >> 4)) & 0x00FF00FF
    return low, (high | (high >> 8)) & 0xFFFF


@triton.jit
def from_planes(low, high):
    """Invert `to_planes`; the upper half of `high` is ignored."""
    high &= 0xFFFF
    high = (high | (high << 8)) & 0x00FF00FF
    high = (high | (high << 4)) & 0x0F0F0F0F
    high = (high | (high << 2)) & 0x33333333
    high = (high | (high << 1)) & 0x55555555
    even = (low & 0x33333333) | ((high & 0x11111111) << 2)
    return even, ((low >> 2) & 0x33333333) | (high & 0x44444444)


@triton.jit
def store(words, halves, first, second, low, high, lengths, WORD: tl.constexpr):
    """Store both planes of blocks of `lengths` elements, from the words `first` and `second` of WORD bits on.

    `words` and `halves` (16 bits) are the same address; `low` and `high` are [rows, n], the others [rows].
    """
    part = tl.arange(0, low.shape[1])[None, :]
    needed = part * 16 // WORD * WORD < lengths[:, None]
    first = first[:, None]
    second = second[:, None]
    if WORD == 32:
        tl.store(words + first + part, low.to(tl.int32, bitcast=True), mask=part * 16 < lengths[:, None])
        at = 2 * second + part
    else:
        tl.store(halves + first, low.to(tl.int16), mask=lengths[:, None] > 0)
        tl.store(halves + first + 1, (low >> 16).to(tl.int16), mask=lengths[:, None] > 8)
        at = second + part
    tl.store(halves + at, high.to(tl.int16), mask=needed)
