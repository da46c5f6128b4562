"""Codes of 3 bits: a plane of 2 bits and a plane of 1 (packing.py), between which and floats they lie in
words of 4 bits a code, even and odd codes apart.

    even  0 p b b  of codes 0, 2, 4 ...      low   b b  of codes 0, 1, 2 ...
    odd   0 p b b  of codes 1, 3, 5 ...      high  p    of codes 0, 1, 2 ...
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_planes(even, odd):
    """uint32 of 8 codes each -> uint32 of 16 codes' lower bits, uint32 whose lower half is the highest."""
    low = (even & 0x33333333) | ((odd & 0x33333333) << 2)
    high = ((even >> 2) & 0x11111111) | (odd & 0x44444444)
    high = (high | (high >> 1)) & 0x33333333
    high = (high | (high >> 2)) & 0x0F0F0F0F
    high = (high | (high >> 4)) & 0x00FF00FF
    return low, (high | (high >> 8)) & 0xFFFF


@triton.jit
def from_planes(low, high):
    """The inverse; what is above the lower half of `high` may be anything."""
    high &= 0xFFFF
    high = (high | (high << 8)) & 0x00FF00FF
    high = (high | (high << 4)) & 0x0F0F0F0F
    high = (high | (high << 2)) & 0x33333333
    high = (high | (high << 1)) & 0x55555555
    even = (low & 0x33333333) | ((high & 0x11111111) << 2)
    return even, ((low >> 2) & 0x33333333) | (high & 0x44444444)


@triton.jit
def store(words, halves, first, second, low, high, lengths, WORD: tl.constexpr):
    """Both planes of blocks of `lengths` elements, from the `first` and the `second` word of WORD bits on.

    `words` and `halves`, of 16 bits, are one pointer; the others [rows] but for `to_planes`' [rows, n].
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
