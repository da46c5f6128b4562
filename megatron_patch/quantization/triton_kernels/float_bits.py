"""Arithmetic of both kernels: bf16 by its bits, exact quotients without a division, sums, packed codes.

It uses few instructions. To move memory as fast as a copy does, a kernel on a Hopper GPU has time for some
fifty per element; an IEEE division takes ten, and a select, a conversion or an address takes one.
"""

from __future__ import annotations

import triton
import triton.language as tl

IS_OLD = tl.constexpr(triton.__version__.startswith(("3.4.", "3.5.")))
"""Whether Triton is a release before 3.6, whose `tl.div_rn` takes subnormal numbers for 0."""
INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC0)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def as_int32(number: tl.constexpr):
    return tl.constexpr((number + 0x80000000) % 0x100000000 - 0x80000000)


@triton.jit
def from_bf16(stored):
    """Convert bf16, stored as int16, to fp32."""
    return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(values):
    """Round fp32 to bf16, stored as int16, ties to even. The interpreter's own conversion differs."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > INFINITE, NAN, rounded).to(tl.int16)


@triton.jit
def round_up_to_bf16(value, largest):
    """Round fp32 >= 0 up to bf16, as fp32, but to `largest` at most."""
    bits = (value.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.minimum(bits.to(tl.float32, bitcast=True), largest)


@triton.jit
def over(value, inverse):
    """Return value / L, correctly rounded to fp32; `inverse` is the constant 1/L, for a whole L below 128.

    fp64 is exact enough: a quotient by so short a number is never that near the middle between two fp32.
    """
    return (value.to(tl.float64) * inverse).to(tl.float32)


@triton.jit
def normal(scale):
    """Return a power of two that scales fp32 >= 0 to near 1, and its inverse; both are normal, for 0 too."""
    exponent = scale.to(tl.int32, bitcast=True) & INFINITE
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)  # The exponents of 2^-126 to 2^126.
    return ((254 << 23) - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """Return (head, tail) whose sum is 1/scale to 44 bits, for a bf16 that `normal` has scaled to near 1."""
    scale = tl.maximum(scale, 1.0 / 256)  # 0 has no inverse; all other scales are larger than this.
    head = 1.0 / scale
    return head, tl.fma(-scale, head, 1.0) * head


@triton.jit
def quotient(values, head, tail):
    """Return fp32 [rows, n] / scale [rows], correctly rounded, from `inverse_of(scale)`.

    Before it rounds, the fused multiply-add is wrong by a relative 2^-44; a quotient by a bf16 (8 bits) is
    never nearer than 2^-33 to the middle between two fp32.
    """
    return tl.fma(values, tl.broadcast_to(head[:, None], values.shape), values * tail[:, None])


@triton.jit
def divided(total, divisor):
    """Return fp32 / fp32, correctly rounded. Rounding it to fp64 first changes no bit."""
    divisor = tl.zeros(total.shape, tl.float32) + divisor
    if IS_OLD:
        result = (total.to(tl.float64) / divisor.to(tl.float64)).to(tl.float32)
    else:
        result = tl.div_rn(total, divisor)
    return result


@triton.jit
def mean(total, number):
    """Return fp64 / int32 from 1 to 4096, correctly rounded to fp64 and then to fp32.

    It avoids the call that a division makes for numbers near fp64's limits.
    """
    short = 1.0 / number.to(tl.float32)
    number, inverse = number.to(tl.float64), short.to(tl.float64)
    inverse = tl.fma(tl.fma(-number, inverse, tl.full(total.shape, 1.0, tl.float64)), inverse, inverse)
    average = total * inverse
    return tl.fma(tl.fma(-number, average, total), inverse, average).to(tl.float32)


@triton.jit
def root(value):
    """Return the square root, correctly rounded, of fp32 that is 0 or between 2^-40 and 2^40.

    It avoids the call that tl.sqrt_rn makes for other numbers, which costs a loop registers. It was tested
    with every fraction, and with an rsqrt that is wrong by up to 4 units in the last place.
    """
    near = tl.rsqrt(tl.maximum(value, 2.0**-40))
    sqrt, half = value * near, 0.5 * near
    wrong = tl.fma(-half, sqrt, tl.full(value.shape, 0.5, tl.float32))
    sqrt, half = tl.fma(sqrt, wrong, sqrt), tl.fma(half, wrong, half)
    return tl.fma(tl.fma(-sqrt, sqrt, value), half, sqrt)


@triton.jit
def split_pairs(values):
    """Return the even and the odd columns of [rows, n]. Neighbours are in one thread: no data is moved."""
    return tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))


@triton.jit
def largest_magnitude(values):
    """Return max|x| of each row, as the integer of its bits, in which NaN and Inf are the largest."""
    for _ in tl.static_range(4):  # The 16 numbers of a thread are compared as floats, threads as integers.
        even, odd = split_pairs(values)
        values = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)


@triton.jit
def squares_of_four(values):
    """Return the sums of four neighbours' squares: [rows, n] -> [rows, n / 4]."""
    even, odd = split_pairs(values)
    a, b = split_pairs(even)
    c, d = split_pairs(odd)
    return tl.fma(a, a, tl.fma(b, b, tl.fma(c, c, d * d)))


@triton.jit
def add_energies(sums, values, unit, finite):
    """Add the squares of fp32 [rows, n] times `unit` [rows], in `finite` rows, to fp64 [rows, n / 16]."""
    squares = tl.reshape(squares_of_four(values), (values.shape[0], values.shape[1] // 16, 4))
    squares = tl.sum(squares, axis=2)
    squares = tl.where(finite[:, None], squares, 0.0).to(tl.float64)
    unit = unit.to(tl.float64)
    return tl.fma(squares, tl.broadcast_to((unit * unit)[:, None], sums.shape), sums)


@triton.jit
def packed(numbers, BITS: tl.constexpr, WORD: tl.constexpr):
    """Add int32 [rows, n], each shifted to its place, into words: [rows, n * BITS / WORD].

    The first number is at bit 0, the next at BITS; a number's bits above BITS are added to its neighbours.
    """
    for level in tl.static_range(5):
        if BITS << level < WORD:
            low, high = split_pairs(numbers)
            numbers = low + (high << (BITS << level))
    return numbers
