"""What both kernels compute with: bf16 by its bits, exact quotients without a division, sums, packed codes.

In few instructions. On a Hopper GPU that is to move memory as fast as a copy does, an element of a bucket has
time for some fifty; an IEEE division takes ten, a select, a conversion or an address one each.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC0)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def as_int32(number: tl.constexpr):
    return tl.constexpr((number + 0x80000000) % 0x100000000 - 0x80000000)


@triton.jit
def from_bf16(stored):
    """int16 -> the fp32 whose upper half it is."""
    return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(values):
    """fp32 -> int16: to nearest, ties to even. By hand: the interpreter's own conversion differs."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > INFINITE, NAN, rounded).to(tl.int16)


@triton.jit
def round_up_to_bf16(value, largest):
    """fp32 >= 0 -> the smallest bf16 not below it, as fp32; at most `largest`."""
    bits = (value.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.minimum(bits.to(tl.float32, bitcast=True), largest)


@triton.jit
def over(value, inverse):
    """value / L, correctly rounded to fp32; `inverse` is the constant 1/L, for a whole L below 128.

    A quotient by so short a number is never as near to the middle between two fp32 as fp64 errs.
    """
    return (value.to(tl.float64) * inverse).to(tl.float32)


@triton.jit
def normal(scale):
    """A power of two that brings fp32 >= 0 near 1, and its inverse: normal numbers both, for 0 too."""
    exponent = scale.to(tl.int32, bitcast=True) & INFINITE
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)  # of 2^-126 to 2^126; 1 has 127 << 23
    return ((254 << 23) - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """(head, tail) whose sum is 1/scale to 44 places, for a bf16 that `normal` brought near 1."""
    scale = tl.maximum(scale, 1.0 / 256)  # 0 has no inverse; the others are larger than this
    head = 1.0 / scale
    return head, tl.fma(-scale, head, 1.0) * head


@triton.jit
def quotient(values, head, tail):
    """fp32 [rows, n] / scale [rows], correctly rounded, from the scale's `inverse_of`.

    What the fused multiply-add rounds is wrong by 2^-44 of itself, and a quotient by a bf16 (8 places) is
    never nearer than 2^-33 to the middle between two fp32.
    """
    return tl.fma(values, tl.broadcast_to(head[:, None], values.shape), values * tail[:, None])


@triton.jit
def mean(total, number):
    """fp64 / int32 from 1 to 4096, correctly rounded to fp64 and then to fp32.

    Without the call for numbers near fp64's limits that a division has in it.
    """
    short = 1.0 / number.to(tl.float32)
    number, inverse = number.to(tl.float64), short.to(tl.float64)
    inverse = tl.fma(tl.fma(-number, inverse, tl.full(total.shape, 1.0, tl.float64)), inverse, inverse)
    found = total * inverse
    return tl.fma(tl.fma(-number, found, total), inverse, found).to(tl.float32)


@triton.jit
def root(value):
    """The square root of fp32, 0 or between 2^-40 and 2^40, correctly rounded.

    Without the call for other numbers that tl.sqrt_rn has in it, for which a loop pays in registers. Tried
    with every fraction and with an rsqrt wrong by 4 units in the last place either way.
    """
    near = tl.rsqrt(tl.maximum(value, 2.0**-40))
    found, half = value * near, 0.5 * near
    wrong = tl.fma(-half, found, tl.full(value.shape, 0.5, tl.float32))
    found, half = tl.fma(found, wrong, found), tl.fma(half, wrong, half)
    return tl.fma(tl.fma(-found, found, value), half, found)


@triton.jit
def split_pairs(values):
    """[rows, n] -> the even and the odd columns. Neighbours lie in one thread: nothing is exchanged."""
    return tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))


@triton.jit
def largest_magnitude(values):
    """max|x| of each row, as the integer of its bits: NaN and Inf come out on top."""
    for _ in tl.static_range(4):  # the 16 that a thread has, as floats; across threads as integers
        even, odd = split_pairs(values)
        values = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)


@triton.jit
def squares_of_four(values):
    """[rows, n] -> [rows, n / 4]: sums of four neighbours' squares."""
    even, odd = split_pairs(values)
    a, b = split_pairs(even)
    c, d = split_pairs(odd)
    return tl.fma(a, a, tl.fma(b, b, tl.fma(c, c, d * d)))


@triton.jit
def add_energies(sums, values, unit, finite):
    """`sums`, fp64 [rows, n / 16], and the squares of fp32 [rows, n] times `unit` [rows], where `finite`."""
    squares = tl.reshape(squares_of_four(values), (values.shape[0], values.shape[1] // 16, 4))
    squares = tl.sum(squares, axis=2)
    squares = tl.where(finite[:, None], squares, 0.0).to(tl.float64)
    unit = unit.to(tl.float64)
    return tl.fma(squares, tl.broadcast_to((unit * unit)[:, None], sums.shape), sums)


@triton.jit
def packed(numbers, BITS: tl.constexpr, WORD: tl.constexpr):
    """int32 [rows, n] -> [rows, n * BITS / WORD]: words that are sums of numbers shifted to their places.

    The first number is at bit 0, the next at BITS; what one has above its BITS is added to its neighbours.
    """
    for level in tl.static_range(5):
        if BITS << level < WORD:
            low, high = split_pairs(numbers)
            numbers = low + (high << (BITS << level))
    return numbers
