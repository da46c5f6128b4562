"""The kernel of compress: reads gradient and error, writes payload and new error, in one pass over memory.

A program takes tiles of ROWS neighbouring blocks of one shard; a thread has 16 neighbouring elements:

    gradient, rotated, and error  ->  h  ->  max|h| of each row  ->  scale  ->  codes, packed  ->  payload
                                                          r = h - s*q            ->  error

The results are those of loco.py and of the codec, bit for bit: a multiplication and an addition are fused
only if the product is exact, as that of a code and a scale is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.quantization.triton_kernels import levels, rotation
from megatron_patch.quantization.triton_kernels.float_bits import (
    INFINITE,
    IS_OLD,
    NAN,
    add_energies,
    as_int32,
    from_bf16,
    inverse_of,
    largest_magnitude,
    mean,
    normal,
    over,
    packed,
    quotient,
    round_up_to_bf16,
    to_bf16,
)

# Three stages are two buffers: the next tile is loaded to shared memory while this one is computed. (Two
# stages are a single buffer, which is loaded after it was read.) Triton's releases before 3.6 cannot compile
# that for errors in int8.
_STAGES = tl.constexpr(1 if IS_OLD else 3)
# 1.5 * 2^23: its sum with a number is rounded to a whole number, ties to even, which is in the lowest bits.
_WHOLE = tl.constexpr(12582912.0)
_WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _load_1(pointer, at, count, K: tl.constexpr):
    return tl.load(pointer + at + K, mask=at + K < count, other=0)


@triton.jit
def _load_4(pointer, at, count, K: tl.constexpr):
    even = tl.join(_load_1(pointer, at, count, K), _load_1(pointer, at, count, K + 8))
    odd = tl.join(_load_1(pointer, at, count, K + 4), _load_1(pointer, at, count, K + 12))
    return tl.join(even, odd)


@triton.jit
def _load_16(pointer, at, count):
    """Load elements `at` to `at` + 15 for `at` [rows, n]: [rows, n, 2, 2, 2, 2], 0 from element `count` on.

    This is for tiles that are not aligned. A single load would spread the 16 elements over 16 threads, and
    they would be brought together through shared memory several times.
    """
    even = tl.join(_load_4(pointer, at, count, 0), _load_4(pointer, at, count, 2))
    odd = tl.join(_load_4(pointer, at, count, 1), _load_4(pointer, at, count, 3))
    return tl.join(even, odd)


@triton.jit
def _load_rows(pointer, start, length, live, ROWS: tl.constexpr, B: tl.constexpr, ALIGNED: tl.constexpr):
    """Load `length` elements from `start` on, both [ROWS], as [ROWS, B], with zeros where not `live`."""
    if ALIGNED:
        in_row = tl.arange(0, B)[None, :]
        return tl.load(pointer + (start[:, None] + in_row), mask=live, other=0)
    at = tl.arange(0, B // 16)[None, :] * 16
    return tl.reshape(_load_16(pointer + start[:, None], at, length[:, None]), (ROWS, B))


@triton.jit
def compress_kernel(
    gradient,  # fp32, bf16 (as int16) or fp16 [numel]
    error,  # int8, bf16 (as int16) or fp32 [shards, shard_size]; unused if ERROR is 0
    error_scales,  # bf16 [shards, blocks] as int16
    payloads,  # uint8, end to end
    starts,  # where each shard's payload begins, in units of 16 bytes, int32 [shards + 1]
    places,  # BlockTable.places, int32 [shards, blocks, 3]
    diagonal,  # rotation.diagonal, fp32 [B]; unused without ROTATE
    statistics,  # fp64 [5], zeros; unused without MEASURE
    shard_size,
    blocks,
    code_bytes,
    beta,
    rest,
    largest,
    largest8,
    step,
    BITS: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    BF16: tl.constexpr,
    ERROR: tl.constexpr,  # 0: none, 1: int8, 2: bf16, 3: fp32
    ALIGNED: tl.constexpr,  # shards and blocks begin at, and have, multiples of 16 elements
    WHOLE: tl.constexpr,  # every block has B elements, or none if its shard has fewer blocks
    LEVELS: tl.constexpr,  # codec levels; else BITS = 1 is codec sign, and more bits are codec uniform
    ROTATE: tl.constexpr,
    BETA_IS_ZERO: tl.constexpr,
    MEASURE: tl.constexpr,
):
    WORD: tl.constexpr = 32 if B * BITS >= 32 else 16
    WORDS: tl.constexpr = B * BITS // WORD  # Words of a block.
    # Codes in two's complement are made from code + HALF >= 0, which add up to a word without a carry; then
    # the bit HALF is flipped.
    HALF: tl.constexpr = 1 << (BITS - 1)
    LIMIT: tl.constexpr = HALF - 1
    EACH: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)  # It has a 1 in every code of a word.
    program = tl.program_id(0)
    shard = tl.program_id(1).to(tl.int64)
    in_row = tl.arange(0, B)[None, :]
    base = shard * shard_size
    if ALIGNED:  # This tells the compiler that loads and stores may be 16 elements wide.
        base = tl.multiple_of(base, 16)
    gradient += base
    error += base
    error_scales += shard * blocks
    sixteens = tl.load(starts + shard).to(tl.int64)
    payload = payloads + sixteens * 16
    words = payload.to(tl.pointer_type(tl.int32 if WORD == 32 else tl.int16), bitcast=True)
    scales = payload.to(tl.pointer_type(tl.int16), bitcast=True) + code_bytes // 2
    places += shard * blocks * 3
    of_h = tl.zeros([ROWS, B // 16], tl.float64)
    of_r = tl.zeros([ROWS, B // 16], tl.float64)
    of_g = tl.zeros([ROWS, B // 16], tl.float64)
    of_e = tl.zeros([ROWS, B // 16], tl.float64)
    bad = tl.zeros([ROWS], tl.int32)
    for tile in tl.range(
        program, tl.cdiv(blocks, ROWS), tl.num_programs(0), num_stages=_STAGES if ALIGNED else 1
    ):
        first_row = tile * tl.full([], ROWS, tl.int64)
        rows_left = blocks - tile * ROWS
        there = tl.arange(0, ROWS) < rows_left
        here = places + first_row * 3 + tl.arange(0, ROWS) * 3
        first = tl.load(here, mask=there, other=0)
        length = tl.load(here + 1, mask=there, other=0)
        if ALIGNED:
            first = tl.multiple_of(first, 16)
        if WHOLE:
            live = tl.broadcast_to((length > 0)[:, None], (ROWS, B))
        elif ALIGNED:
            live = in_row // 16 < length[:, None] // 16
        else:
            live = in_row < length[:, None]
        at = first[:, None] + in_row  # The elements' indices in the shard.
        g = _load_rows(gradient, first, length, live, ROWS, B, ALIGNED)
        g = from_bf16(g) if BF16 else g.to(tl.float32)
        if ROTATE:
            g = rotation.scaled(g, diagonal, length, B, 16, WHOLE)
            g = rotation.hadamard(g, length, B, 16, WHOLE)
        h = g
        if ERROR != 0:
            stored = _load_rows(error, first, length, live, ROWS, B, ALIGNED)
            if ERROR == 1:
                old = from_bf16(tl.load(error_scales + first_row + tl.arange(0, ROWS), mask=there, other=0))
                stored = stored.to(tl.float32)
                e = stored * old[:, None]
                h = tl.fma(stored, tl.broadcast_to(old[:, None], stored.shape), g)
            else:
                e = from_bf16(stored) if ERROR == 2 else stored
                h = g + e
        largest_h = largest_magnitude(h)
        finite = largest_h < INFINITE
        largest_h = tl.where(finite, largest_h, 0).to(tl.float32, bitcast=True)

        if LEVELS:
            unit, inverse_unit = normal(largest_h)
            near_one = h * unit[:, None]
            wanted = levels.wanted_scale(near_one, inverse_unit, length, step, WHOLE)
            wanted = tl.where(finite, wanted, 0.0)
        elif BITS == 1:
            total = tl.sum(tl.where(live, tl.abs(h), 0.0).to(tl.float64), axis=1)
            wanted = tl.where(finite, mean(total, tl.maximum(length, 1)), 0.0)
        elif BITS == 2:
            wanted = largest_h
        else:
            wanted = over(largest_h, 1.0 / LIMIT)
        scale = round_up_to_bf16(wanted, largest)
        if not LEVELS:
            unit, inverse_unit = normal(scale)
            near_one = h * unit[:, None]
        if LEVELS:
            held = levels.encode(h, scale, BITS)
            q = levels.decode(held, tl.full([1, 1], levels.PLACE, tl.int32), BITS)
            usable = (scale > 0)[:, None]
            sums = tl.where(usable, levels.words_of(held, BITS, WORD), 0)
        elif BITS == 1:
            q = tl.where(h >= 0, 1.0, -1.0)
            sums = packed(tl.where(live & (q > 0), 1, 0), BITS, WORD)
        else:
            head, tail = inverse_of(scale * unit)
            ratio = quotient(near_one, head, tail)
            whole = ratio + (_WHOLE + HALF)
            q = whole - (_WHOLE + HALF)
            whole = whole.to(tl.int32, bitcast=True)
            usable = (scale > 0)[:, None]
            sums = packed(whole, BITS, WORD) - as_int32(_WHOLE_BITS * EACH)
            sums = tl.where(usable, sums ^ as_int32(HALF * EACH), 0)
        if WHOLE:
            words_here = words + first_row * WORDS
            at_word = tl.arange(0, ROWS) * WORDS
        else:
            words_here = words
            at_word = tl.load(here + 2, mask=there, other=0)
        word = tl.arange(0, WORDS)[None, :]
        tl.store(
            words_here + at_word[:, None] + word,
            sums.to(words.dtype.element_ty),
            mask=word * (WORD // BITS) < length[:, None],
        )
        sent_scale = tl.where(finite, scale.to(tl.int32, bitcast=True) >> 16, NAN).to(tl.int16)
        tl.store(scales + first_row + tl.arange(0, ROWS), sent_scale, mask=there)

        r = tl.fma(-q, tl.broadcast_to(scale[:, None], q.shape), h)
        if BITS == 1 or (LEVELS and not WHOLE):
            r = tl.where(live, r, 0.0)
        if MEASURE:
            bad += (there & (finite == 0)).to(tl.int32)
            of_h = add_energies(of_h, near_one, inverse_unit, finite)
            of_r = add_energies(of_r, r * unit[:, None], inverse_unit, finite)
        if MEASURE and ERROR != 0:
            # Where e cancels g, the unit of h would be too large for them.
            if ERROR == 1:
                e_unit, inverse_e_unit = normal(old)
                of_e = add_energies(of_e, stored, old, finite)
            else:
                largest_e = largest_magnitude(e).to(tl.float32, bitcast=True)
                e_unit, inverse_e_unit = normal(tl.where(finite, largest_e, 0.0))
                of_e = add_energies(of_e, e * e_unit[:, None], inverse_e_unit, finite)
            unit = tl.minimum(unit, e_unit)
            of_g = add_energies(of_g, g * unit[:, None], tl.maximum(inverse_unit, inverse_e_unit), finite)
        if ERROR != 0:
            average = r if BETA_IS_ZERO else e * beta + r * rest
            sent = live & finite[:, None]
            if ERROR == 1:
                most = largest_magnitude(average).to(tl.float32, bitcast=True)
                new = round_up_to_bf16(over(most, 1.0 / 127.0), largest8)
                new_unit, _ = normal(new)
                head, tail = inverse_of(new * new_unit)
                whole = quotient(average * new_unit[:, None], head, tail) + _WHOLE
                tl.store(error + at, whole.to(tl.int32, bitcast=True).to(tl.int8), mask=sent)
                new = (new.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
                tl.store(error_scales + first_row + tl.arange(0, ROWS), new, mask=there & finite)
            elif ERROR == 2:
                tl.store(error + at, to_bf16(average), mask=sent)
            else:
                tl.store(error + at, average, mask=sent)
    # Zeros fill the codes up to the length of the longest shard's codes, and to the alignment.
    last = places + (blocks - tl.full([], 1, tl.int64)) * 3
    used = tl.load(last + 2) + tl.cdiv(tl.load(last + 1) * BITS, WORD)
    for rest_of_codes in tl.range(
        used + program.to(tl.int64) * 128, code_bytes // (WORD // 8), tl.num_programs(0) * 128
    ):
        unused = rest_of_codes + tl.arange(0, 128)
        zeros = tl.zeros([128], words.dtype.element_ty)
        tl.store(words + unused, zeros, mask=unused < code_bytes // (WORD // 8))
    if program == 0:  # Zeros fill up the alignment after the scales.
        end = blocks * tl.full([], 2, tl.int64) + code_bytes
        gap = end + tl.arange(0, 16)
        tl.store(payload + gap, tl.zeros([16], tl.uint8), mask=gap < tl.cdiv(end, 16) * 16)
    if MEASURE:
        tl.atomic_add(statistics + 0, tl.sum(of_h), sem="relaxed")
        tl.atomic_add(statistics + 1, tl.sum(of_r), sem="relaxed")
        tl.atomic_add(statistics + 2, tl.sum(of_g if ERROR != 0 else of_h), sem="relaxed")
        tl.atomic_add(statistics + 3, tl.sum(of_e), sem="relaxed")
        tl.atomic_add(statistics + 4, tl.sum(bad).to(tl.float64), sem="relaxed")
