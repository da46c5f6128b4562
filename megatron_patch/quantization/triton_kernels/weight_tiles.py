"""Tiles of weights, for both directions of the weight code: the line, two sums, the sizes of pieces.

A program takes a tile of 2,048 weights, 16 for each of 128 threads; in `sizes_kernel` many tiles, which are
their counts there. Places are int64, numbers inside a tile int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.quantization import weight_code

TILE = tl.constexpr(weight_code.TILE)
NO_BITMAP = tl.constexpr(weight_code.NO_BITMAP)
TILES_AT_ONCE = tl.constexpr(256)  # of sizes_kernel


@triton.jit
def line(bits):
    """int32 that holds an int16 -> its place on the line, as int32; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def load_tile(weights, length):
    """The first `length` of TILE weights as int32 [TILE], zeros behind them."""
    i = tl.arange(0, TILE)
    if length == TILE:  # without a mask, which would keep loads from being wide
        bits = tl.load(weights + i)
    else:
        bits = tl.load(weights + i, mask=i < length, other=0)
    return bits.to(tl.int32)


@triton.jit
def sums_of(bits, start):
    """The two sums of a tile, int64, the first weight of which is number `start` of the shard."""
    x = tl.reshape(bits & 0xFFFF, (TILE // 8, 8))  # neighbours, in one thread
    plain = tl.sum(x, axis=1)
    # Less than 2^31: at most 8 * 255 times `plain`, of 8 * 65535, and 36 * 65535.
    by_place = tl.sum(x * (tl.arange(0, 8) + 1)[None, :], axis=1) + tl.arange(0, TILE // 8) * 8 * plain
    total = tl.sum(plain).to(tl.int64)  # less than 2^27
    return total, tl.sum(by_place.to(tl.int64)) + start * total


@triton.jit(do_not_specialize=["n"])
def sums_kernel(
    weights,  # int16 [n]
    sums,  # int64 [2], zeros
    n: tl.int64,
):
    tiles = (n + TILE - 1) // TILE
    plain = tl.zeros([], tl.int64)
    by_place = tl.zeros([], tl.int64)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = tile * TILE
        length = tl.minimum(n - start, TILE).to(tl.int32)
        one, other = sums_of(load_tile(weights + start, length), start)
        plain += one
        by_place += other
    tl.atomic_add(sums + 0, plain, sem="relaxed")
    tl.atomic_add(sums + 1, by_place, sem="relaxed")


@triton.jit
def count_of(counts, tile, PLANE: tl.constexpr, there):
    """A count of each tile, uint16 in int16, as int32; 0 of those that are not there."""
    return tl.load(counts + 4 * tile + PLANE, mask=there, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def write_sizes(counts, sizes, wrong, n, tiles, whole):
    """A program's part of int64 [5, tiles], bytes of each tile's piece of each plane. Of `counts`, int16
    [tiles, 4], the first `whole` can be read; `wrong`, int32 [1], becomes 1 where they contradict each other.
    """
    tile = tl.program_id(0).to(tl.int64) * TILES_AT_ONCE + tl.arange(0, TILES_AT_ONCE)
    there = tile < tiles
    length = tl.minimum(n - tile * TILE, TILE).to(tl.int32)
    first = count_of(counts, tile, 0, tile < whole)
    far = count_of(counts, tile, 1, tile < whole)
    farther = count_of(counts, tile, 2, tile < whole)
    farthest = count_of(counts, tile, 3, tile < whole)
    bitmap = first != NO_BITMAP
    first = tl.where(bitmap, first, length)
    right = (first <= length) & (far <= first) & (farther <= far) & (farthest <= farther) & (tile < whole)
    sizes += tile
    tl.store(sizes, tl.where(bitmap, (length + 7) // 8, 0).to(tl.int64), mask=there)
    tl.store(sizes + tiles, ((first + 3) // 4).to(tl.int64), mask=there)
    tl.store(sizes + 2 * tiles, ((far + 1) // 2).to(tl.int64), mask=there)
    tl.store(sizes + 3 * tiles, farther.to(tl.int64), mask=there)
    tl.store(sizes + 4 * tiles, (2 * farthest).to(tl.int64), mask=there)
    contradictions = tl.sum((there & (right == 0)).to(tl.int32))
    tl.atomic_or(wrong, 1, mask=contradictions > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "tiles"], do_not_specialize_on_alignment=["counts"])
def sizes_kernel(
    counts,  # int16 [tiles, 4]
    sizes,  # int64 [5, tiles]
    wrong,  # int32 [1], 0
    n: tl.int64,
    tiles: tl.int64,
):
    write_sizes(counts, sizes, wrong, n, tiles, tiles)
