"""The kernel of decompress_reduce: sums N senders' payloads of one shard, in one pass over memory.

A thread has V words of codes, and keeps their sums in registers while it reads sender after sender. A code
becomes a float without a conversion: its bits are put into the mantissa of a float whose exponent is such
that a unit of the code is worth 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.quantization.triton_kernels import levels, rotation
from megatron_patch.quantization.triton_kernels.float_bits import divided, from_bf16, to_bf16


@triton.jit
def _codes(words, ones, BITS: tl.constexpr, WORD: tl.constexpr, LEVELS: tl.constexpr):
    """Decode words, uint32 [lanes, V], to fp32 [lanes, V * WORD / BITS], each in the thread of its word."""
    lanes: tl.constexpr = words.shape[0]
    count: tl.constexpr = words.shape[1] * (WORD // BITS)
    if LEVELS:  # The polynomials of levels.decode need small exponents.
        words = levels.from_wire(words, BITS)
        at = tl.full(words.shape, levels.PLACE, tl.int32)
        words = (
            tl.join(words << levels.PLACE, words >> (16 - levels.PLACE))
            if WORD == 32
            else words << levels.PLACE
        )
    else:
        if BITS > 1:  # The words then have code + 2^(BITS-1) instead of the code.
            words ^= (1 << (BITS - 1)) * (0xFFFFFFFF // ((1 << BITS) - 1))
        at = tl.zeros(words.shape, tl.int32)  # The code's bit in the word is known at compile time.
        words = (
            tl.join(words, words >> 16) if WORD == 32 else words
        )  # A mantissa has no room for codes above bit 16.
    if WORD == 32:
        at = tl.join(at, at)
    for level in tl.static_range(4):
        if 8 >> level >= BITS:
            words = tl.join(words, words)
            at = tl.join(at, at + (8 >> level))
    if BITS == 1:
        codes = (((~words << (31 - at)) & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        exponent = (127 + 23 - at) << 23
        held = (words & (ones << at)) | exponent.to(tl.uint32)
        if LEVELS:
            codes = levels.decode(held, at, BITS)
        else:
            zero = exponent.to(tl.float32, bitcast=True) + (1 << (BITS - 1))  # The float of a code of 0.
            codes = held.to(tl.float32, bitcast=True) - zero
    return tl.reshape(codes, (lanes, count))


@triton.jit(do_not_specialize=["ones"])
def decompress_reduce_kernel(
    words,  # payloads [senders or shards, payload_bytes] as int32 words, or int16 if a block has fewer bits
    scales,  # the payloads as int16, from the first scale on
    places,  # BlockTable.places, int32 [shards, blocks, 3]
    diagonal,  # rotation.diagonal, fp32 [B]; unused without ROTATE
    output,  # [numel] or more; bf16 as int16
    shard_size,
    blocks,
    senders,
    payload_quads,
    ones,  # the mask of a code's field
    divisor,
    BITS: tl.constexpr,
    B: tl.constexpr,
    LANES: tl.constexpr,
    V: tl.constexpr,
    SHARDS: tl.constexpr,  # there is one payload for each shard; else there is one for each sender
    WHOLE: tl.constexpr,  # every block has B elements, or none if its shard has fewer blocks
    LEVELS: tl.constexpr,  # codec levels; else BITS = 1 is codec sign, and more bits are codec uniform
    ROTATE: tl.constexpr,
    DIVIDE: tl.constexpr,
    BF16: tl.constexpr,
):
    WORD: tl.constexpr = 32 if B * BITS >= 32 else 16
    LANE: tl.constexpr = V * (WORD // BITS)  # Elements of a lane, all of one block.
    # A program has whole blocks. Lanes, blocks and elements are counted from the program's first ones.
    ROWS: tl.constexpr = LANES * LANE // B
    program = tl.program_id(0).to(tl.int64)
    payload_words = payload_quads * tl.full([], 128 // WORD, tl.int64)
    payload_scales = payload_quads * tl.full([], 8, tl.int64)
    if SHARDS:
        shard = tl.program_id(1).to(tl.int64)
        words += shard * payload_words
        scales += shard * payload_scales
        places += shard * blocks * 3
        output += shard * shard_size
    places += program * (ROWS * 3)
    blocks = tl.minimum(blocks - program * ROWS, ROWS).to(tl.int32)
    lane = tl.arange(0, LANES)
    block = lane // (B // LANE)
    in_block = lane % (B // LANE)
    start = tl.load(places + 3 * block, mask=block < blocks, other=0)
    length = tl.load(places + 3 * block + 1, mask=block < blocks, other=0)
    word = in_block[:, None] * V + tl.arange(0, V)[None, :]
    if WHOLE:
        there = length > 0
        coded_there = there[:, None]
        first = program * (ROWS * (B * BITS // WORD)) + block * (B * BITS // WORD)
    else:
        there = in_block * LANE < length
        coded_there = word * (WORD // BITS) < length[:, None]
        first = tl.load(places + 3 * block + 2, mask=there, other=0).to(tl.int64)
    words += first[:, None] + word
    scales += program * ROWS
    scales += block
    # The mask is an argument so that it and its shifts stay in registers; the exponents are constants.
    ones = ones.to(tl.uint32)
    total = tl.full([LANES, LANE], -0.0, tl.float32)  # -0 added to -0 stays -0.
    for _ in tl.range(0, senders, loop_unroll_factor=4):
        coded = tl.load(words, mask=coded_there, other=0).to(tl.uint32)
        codes = _codes(coded, ones, BITS, WORD, LEVELS)
        scale = from_bf16(tl.load(scales, mask=there, other=0))
        total = tl.fma(codes, tl.broadcast_to(scale[:, None], codes.shape), total)
        words += payload_words
        scales += payload_scales
    if ROTATE:
        total = tl.reshape(total, (ROWS, B))
        row = tl.arange(0, ROWS)
        real = tl.load(places + 3 * row + 1, mask=row < blocks, other=0)
        total = rotation.hadamard(total, real, B, LANE, WHOLE)
        total = tl.reshape(rotation.scaled(total, diagonal, real, B, LANE, WHOLE), (LANES, LANE))
    if DIVIDE:
        total = divided(total, divisor)
    at = in_block[:, None] * LANE + tl.arange(0, LANE)[None, :]
    live = at < length[:, None]
    at += start[:, None]
    total = to_bf16(total) if BF16 else total.to(output.dtype.element_ty)
    tl.store(output + at, total, mask=live)
