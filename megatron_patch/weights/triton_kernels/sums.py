"""The sums of weights/sums.py on a GPU: a program takes tiles of 2,048 weights, 16 for each of 128 threads.

Positions in a shard are int64, positions within a tile int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_patch.weights import sums as weight_sums
from megatron_patch.weights.sums import tiles_of

TILE = tl.constexpr(weight_sums.TILE)
_STEP = tl.constexpr(weight_sums.STEP)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift, _ in weight_sums.MIX)
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor) for _, factor in weight_sums.MIX[:2])
_PROGRAMS = 2048  # The most programs of `sums` per row, enough for any GPU.


@triton.jit
def line(bits):
    """Return the place on the line of an int16 held in int32; the function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def load_tile(weights, length):
    """Load `length` weights as int32 [TILE], with zeros after them."""
    i = tl.arange(0, TILE)
    if length == TILE:  # A mask would keep loads from being wide.
        bits = tl.load(weights + i)
    else:
        bits = tl.load(weights + i, mask=i < length, other=0)
    return bits.to(tl.int32)


@triton.jit
def _keys(j):
    """Return the keys of a tile's words `j` for the first sum, uint32."""
    key = (j + 1).to(tl.uint32) * 0x9E3779B1
    key = (key ^ (key >> 15)) * 0x85EBCA6B
    key = (key ^ (key >> 13)) * 0xC2B2AE35
    return key ^ (key >> 16)


@triton.jit
def _products(keyed):
    """Return the sum of the products of uint32 [words, 2], modulo 2^64."""
    even, odd = tl.split(keyed)
    return tl.sum((even.to(tl.uint64) * odd.to(tl.uint64)).to(tl.int64, bitcast=True))


@triton.jit
def _mixed(total, tile):
    """Return what a tile's sum of products, int64, adds to the shard's sum."""
    place = (tl.full([], 1, tl.int64) + tile).to(tl.uint64, bitcast=True)
    z = total.to(tl.uint64, bitcast=True) + place * _STEP
    z = (z ^ (z >> _SHIFT_1)) * _FACTOR_1
    z = (z ^ (z >> _SHIFT_2)) * _FACTOR_2
    return (z ^ (z >> _SHIFT_3)).to(tl.int64, bitcast=True)


@triton.jit
def sums_of(bits, tile):
    """Return what tile number `tile` of a shard adds to the shard's two sums, int64."""
    low, high = tl.split(tl.reshape(bits & 0xFFFF, (TILE // 4, 2, 2)))  # Neighbours are in one thread.
    words = (low | (high << 16)).to(tl.uint32, bitcast=True)
    keys = _keys(tl.arange(0, TILE // 4)[:, None] * 2 + tl.arange(0, 2)[None, :])
    first = _products(words + keys)
    second = _products(words + ((keys >> 16) | (keys << 16)))
    return _mixed(first, tile), _mixed(second, tile)


@triton.jit(do_not_specialize=["n"])
def sums_kernel(
    weights,  # int16 [rows, n]
    sums,  # int64 [rows, 2], zeros
    n: tl.int64,
    SIXTEENS: tl.constexpr,  # n is a multiple of 16, so that all rows are aligned for wide loads
):
    row = tl.program_id(1).to(tl.int64)
    first = row * n
    if SIXTEENS:
        first = tl.multiple_of(first, 16)
    tiles = (n + TILE - 1) // TILE
    sum_1 = tl.zeros([], tl.int64)
    sum_2 = tl.zeros([], tl.int64)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = tile * TILE
        length = tl.minimum(n - start, TILE).to(tl.int32)
        tile_1, tile_2 = sums_of(load_tile(weights + first + start, length), tile)
        sum_1 += tile_1
        sum_2 += tile_2
    tl.atomic_add(sums + 2 * row, sum_1, sem="relaxed")
    tl.atomic_add(sums + 2 * row + 1, sum_2, sem="relaxed")


def sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of `weights`, as weights.sums.sums."""
    rows, n = weights.shape[:-1].numel(), weights.shape[-1]
    totals = torch.zeros(*weights.shape[:-1], 2, dtype=torch.int64, device=weights.device)
    programs = min(tiles_of(n), 2 if _interpreted(weights) else _PROGRAMS)
    if programs and rows:
        sums_kernel[(programs, rows)](weights, totals, n, SIXTEENS=n % 16 == 0, enable_fp_fusion=False)
    return totals


def _interpreted(tensor: torch.Tensor) -> bool:
    """Whether the interpreter runs; several programs then share even a small tensor, as on a GPU."""
    return tensor.device.type != "cuda"
