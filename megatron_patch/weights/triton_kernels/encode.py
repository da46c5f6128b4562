"""The weight code's encoder: what each tile will need, and then its pieces, at places summed up in between.

    count_kernel   old, new  ->  counts and sums of each tile
    place_kernel   old, new  ->  bitmaps, dense 2-bit codes, 8- and 16-bit codes into the message;
                                 sparse 2-bit and 4-bit codes, a byte each, into a scratch
    pack_kernel    scratch   ->  sparse 2-bit and 4-bit codes into the message

No two threads write the same byte, and none reads what its own launch has written. A piece is whole bytes of
one tile, so of one program. In it, a byte of several codes is put together in registers, from codes at known
places; where a code's place depends on the codes before it (its rank: a sum over them), it is written in
bytes of its own, to the message or the scratch. What is behind the last code of a tile's scratch is old, and
is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.quantization.triton_kernels.float_bits import packed
from megatron_patch.weights.triton_kernels.tiles import (
    NO_BITMAP,
    TILE,
    count_of,
    line,
    load_tile,
    sums_of,
)

FEW = tl.constexpr(TILE.value // 2)  # a tile with a bitmap has less than this many 2-bit codes


@triton.jit
def _difference(old, new):
    """int32 [TILE] of int16 bits -> d."""
    return (line(new) - line(old)).to(tl.int16).to(tl.int32)


@triton.jit
def _zigzag(d):
    """z of a difference; below 0 where the 2 bits say it all."""
    return 2 * tl.abs(d) - 4 + (d < 0).to(tl.int32)


@triton.jit
def _two_counts(low, high):
    """How many of each hold, both in one sum: less than 2^12 each."""
    both = tl.sum(low.to(tl.int32) + (high.to(tl.int32) << 16))
    return both & 0xFFFF, both >> 16


@triton.jit
def _two_ranks(low, high):
    """How many of each hold at a place and before it, in one scan."""
    both = tl.cumsum(low.to(tl.int32) + (high.to(tl.int32) << 16), axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _store_bytes(piece, codes, count, BITS: tl.constexpr):
    """The first `count` of int32 [m], zeros behind them, in bytes of several."""
    BYTES: tl.constexpr = codes.shape[0] * BITS // 8
    packed_codes = packed(tl.reshape(codes, (1, codes.shape[0])), BITS, 8)
    byte = tl.arange(0, BYTES)
    tl.store(piece + byte, tl.reshape(packed_codes, (BYTES,)).to(tl.uint8), mask=byte * 8 < count * BITS)


@triton.jit(do_not_specialize=["n", "tiles"])
def count_kernel(
    old,  # int16 [n]
    new,  # int16 [n]
    counts,  # uint16 [tiles, 4] as int16
    sums,  # int64 [5, tiles]: how many did not change, two sums of old, two of new
    n: tl.int64,
    tiles: tl.int64,
):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * TILE
    length = tl.minimum(n - start, TILE).to(tl.int32)
    before = load_tile(old + start, length)
    after = load_tile(new + start, length)
    d = _difference(before, after)
    z = _zigzag(d)
    changed, far = _two_counts(d != 0, z >= 0)
    farther, farthest = _two_counts(z >= 15, z >= 270)
    counts += 4 * tile
    tl.store(counts, tl.where(2 * changed < length, changed, NO_BITMAP).to(tl.int16))
    tl.store(counts + 1, far.to(tl.int16))
    tl.store(counts + 2, farther.to(tl.int16))
    tl.store(counts + 3, farthest.to(tl.int16))
    sums += tile
    old_one, old_other = sums_of(before, tile)
    new_one, new_other = sums_of(after, tile)
    tl.store(sums, (length - changed).to(tl.int64))
    tl.store(sums + tiles, old_one)
    tl.store(sums + 2 * tiles, old_other)
    tl.store(sums + 3 * tiles, new_one)
    tl.store(sums + 4 * tiles, new_other)


@triton.jit(do_not_specialize=["n", "tiles", "first_tile"], do_not_specialize_on_alignment=["message"])
def place_kernel(
    old,  # int16 [n]
    new,  # int16 [n]
    counts,  # uint16 [tiles, 4] as int16
    places,  # int64 [5, tiles]: where in the message each piece begins
    message,  # uint8
    few,  # uint8 [programs, FEW]: 2-bit codes of tiles with a bitmap
    fours,  # uint8 [programs, TILE]: 4-bit codes
    n: tl.int64,
    tiles: tl.int64,
    first_tile: tl.int64,
):
    program = tl.program_id(0).to(tl.int64)
    tile = program + first_tile
    start = tile * TILE
    length = tl.minimum(n - start, TILE).to(tl.int32)
    d = _difference(load_tile(old + start, length), load_tile(new + start, length))
    z = _zigzag(d)
    first = tl.where(z >= 0, 3, tl.where(d < 0, 2, d))
    rank, far_rank = _two_ranks(d != 0, z >= 0)
    places += tile
    if count_of(counts, tile, 0, True) != NO_BITMAP:
        _store_bytes(message + tl.load(places), (d != 0).to(tl.int32), length, 1)
        tl.store(few + program * FEW + (rank - 1), first.to(tl.uint8), mask=d != 0)
    else:
        _store_bytes(message + tl.load(places + tiles), first, length, 2)
    tl.store(fours + program * TILE + (far_rank - 1), tl.minimum(z, 15).to(tl.uint8), mask=z >= 0)
    if count_of(counts, tile, 2, True) > 0:
        rank, far_rank = _two_ranks(z >= 15, z >= 270)
        eights = message + tl.load(places + 3 * tiles)
        tl.store(eights + (rank - 1), tl.minimum(z - 15, 255).to(tl.uint8), mask=z >= 15)
        sixteens = message + tl.load(places + 4 * tiles)  # at any byte
        tl.store(sixteens + (2 * far_rank - 2), d.to(tl.uint8), mask=z >= 270)
        tl.store(sixteens + (2 * far_rank - 1), (d >> 8).to(tl.uint8), mask=z >= 270)


@triton.jit
def _pack(scratch, count, piece, BITS: tl.constexpr, MOST: tl.constexpr):
    """`count` codes, a byte each, MOST at most, to bytes of several."""
    i = tl.arange(0, MOST)
    codes = tl.load(scratch + i, mask=i < count, other=0).to(tl.int32)
    _store_bytes(piece, codes, count, BITS)


@triton.jit(do_not_specialize=["tiles", "first_tile"], do_not_specialize_on_alignment=["message"])
def pack_kernel(
    counts,  # uint16 [tiles, 4] as int16
    places,  # int64 [5, tiles]
    message,  # uint8
    few,  # uint8 [programs, FEW]
    fours,  # uint8 [programs, TILE]
    tiles: tl.int64,
    first_tile: tl.int64,
):
    program = tl.program_id(0).to(tl.int64)
    tile = program + first_tile
    changed = count_of(counts, tile, 0, True)
    far = count_of(counts, tile, 1, True)
    places += tile
    if changed != NO_BITMAP:
        _pack(few + program * FEW, changed, message + tl.load(places + tiles), 2, FEW)
    if far > 0:
        _pack(fours + program * TILE, far, message + tl.load(places + 2 * tiles), 4, TILE)
