"""Coding and decoding of the weight code's tiles on a GPU: a warp codes a tile, one row of it at a time.

    encode_kernel   old, new            ->  words of each tile, in a scratch, and its states
    pack_kernel     front, states, words ->  the message, whose length is known by then
    sizes_kernel    messages            ->  words of each tile
    decode_kernel   messages, weights   ->  weights
    verdict_kernel  messages, sums      ->  verdicts

A tile has 32 states, or 8 in short messages, where three quarters of a warp's threads wait. Nothing is read
or written outside a message, whatever its bytes are: every position is compared with the message's length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.weights import code, rans
from megatron_patch.weights.triton_kernels.sums import line
from megatron_patch.weights.triton_kernels.tables import (
    BASE,
    CODED,
    CONTEXTS,
    ESCAPED,
    FAR,
    HEADER_BYTES,
    LANES,
    LOG2_TILE,
    MANTISSA,
    PLAN,
    PRECISION,
    TILES_AT,
    TOTAL,
    WORDS_AT,
    context_of,
    difference,
    number_of_tiles,
)

TILES = tl.constexpr(4)
"""The tiles of a program; each is coded by a warp."""
WARP = tl.constexpr(32)
SMALLEST = tl.constexpr(1 << 12)
"""The fewest weights of a tile (the last one excepted)."""
_CHUNK = tl.constexpr(1024)
_HIGH = tl.constexpr((1 << 32 - PRECISION.value) - 1)
_FIRST_STATE = tl.constexpr(rans.FIRST_STATE)
_RAW = tl.constexpr(code.RAW)
_STALE = tl.constexpr(code.STALE)
_WEIGHTS_DIFFER = tl.constexpr(code.WEIGHTS_DIFFER)
_MESSAGE_CHANGED = tl.constexpr(code.MESSAGE_CHANGED)
_OWNER_CHANGED = tl.constexpr(code.OWNER_CHANGED)


@triton.jit
def _places(plan):
    """Return the bytes of a message where its tiles' counts begin, and where its words begin."""
    return tl.load(plan + TILES_AT) + HEADER_BYTES, tl.load(plan + WORDS_AT) + HEADER_BYTES


@triton.jit
def _tiles_of_program(log2_tile, n):
    """Return the program's tiles and their first weights, int64 [TILES, 1], their lengths, int32 [TILES, 1],
    and the longest of these."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)[:, None]
    size = tl.full([], 1, tl.int64) << log2_tile
    start = tile * size
    length = tl.minimum(tl.maximum(n - start, 0), size).to(tl.int32)
    return tile, start, length, tl.max(length)


@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    old,  # int16 [n]
    new,  # int16 [n]
    table,  # int32 [CONTEXTS, TOTAL]
    plan,  # int64 [PLAN]
    words,  # int16 [2 * n], two for each weight; a tile's words are at the end of its part
    counts,  # int32 [most tiles], zeros: words of each tile
    states,  # int32 [most tiles, WARP]
    n: tl.int64,
):
    lanes, base = tl.load(plan + LANES).to(tl.int32), tl.load(plan + BASE).to(tl.int32)
    mantissa = tl.load(plan + MANTISSA).to(tl.int32)
    tile, start, length, longest = _tiles_of_program(tl.load(plan + LOG2_TILE), n)
    lane = tl.arange(0, WARP)[None, :]
    rows = (longest + lanes - 1) // lanes
    x = tl.full((TILES, WARP), _FIRST_STATE, tl.int32)
    behind = 2 * length
    i = rows * lanes + lane
    for _ in range(rows):
        i -= lanes
        there = (lane < lanes) & (i < length)
        before = tl.load(old + (start + i), mask=there, other=0).to(tl.int32)
        d = difference(before, tl.load(new + (start + i), mask=there, other=0).to(tl.int32))
        size = tl.minimum(tl.abs(d), FAR + 1)
        entry = tl.load(table + context_of(before, mantissa, base) * TOTAL + size, mask=there, other=0)
        f, bits = (entry & (TOTAL - 1)) + 1, (entry >> 20) & 7
        escaped = (entry >> 23) & 1
        full = (there & ((x >> (21 - bits)) >= f)).to(tl.int32)
        said = escaped + full
        behind -= tl.sum(said, 1)[:, None]
        place = 2 * start + (behind + tl.cumsum(said, axis=1) - said)
        tl.store(words + place, d.to(tl.int16), mask=escaped > 0)
        tl.store(words + (place + escaped), x.to(tl.int16), mask=full > 0)
        left = tl.where(full > 0, x >> 16, x)
        quotient = left // f
        raw = (((size - 1) << 1) | (d < 0).to(tl.int32)) & ((1 << bits) - 1)
        taken = ((quotient << bits) | raw) << PRECISION
        taken += ((entry >> PRECISION) & (TOTAL - 1)) + (left - quotient * f)
        x = tl.where(there, taken, x)
    tl.store(states + (tile * WARP + lane), x, mask=length > 0)
    tl.store(counts + tile, 2 * length - behind, mask=length > 0)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["message"])
def pack_kernel(
    front,  # uint8 [FRONT_BYTES]
    plan,  # int64 [PLAN]
    counts,  # int32 [most tiles]
    ends,  # int64 [most tiles]: sums of the counts up to each
    states,  # int32 [most tiles, WARP]
    words,  # int16 [2 * n]
    message,  # uint8 [room]
    n: tl.int64,
    room: tl.int64,
):
    tile = tl.program_id(0).to(tl.int64)
    log2_tile, lanes = tl.load(plan + LOG2_TILE), tl.load(plan + LANES).to(tl.int32)
    tiles_at, words_at = _places(plan)
    if tile == 0:
        byte = tl.arange(0, _CHUNK)
        told = (byte < tiles_at) & (byte < room)
        tl.store(message + byte, tl.load(front + byte), mask=told & ((byte < 4) | (byte >= HEADER_BYTES)))
    start = tile << log2_tile
    if start < n:
        tiles = number_of_tiles(log2_tile, n)
        numbers = (message + tiles_at).to(tl.pointer_type(tl.int32))
        count = tl.load(counts + tile)
        inside = words_at <= room
        tl.store(numbers + tile, count, mask=inside)
        lane = tl.arange(0, WARP)
        state = tl.load(states + tile * WARP + lane)
        tl.store(numbers + (tiles + tile * lanes + lane), state, mask=lane < tl.where(inside, lanes, 0))
        length = tl.minimum(n - start, tl.full([], 1, tl.int64) << log2_tile).to(tl.int32)
        source = words + 2 * start + (2 * length - count)
        at = tl.load(ends + tile) - count
        to = (message + words_at).to(tl.pointer_type(tl.int16)) + at
        most = tl.minimum(tl.maximum((room - words_at) // 2 - at, 0), count).to(tl.int32)
        for first in range(0, most, _CHUNK):
            j = first + tl.arange(0, _CHUNK)
            tl.store(to + j, tl.load(source + j, mask=j < most, other=0), mask=j < most)


@triton.jit
def _message_of(messages, places, row, sender):
    """Return a sender's message and its length in bytes."""
    return messages + sender * row + tl.load(places + 2 * sender), tl.load(places + 2 * sender + 1)


@triton.jit
def _kind(message, size):
    """Return the kind of a message; 0 if the message is shorter than a header."""
    return tl.load(message, mask=size >= HEADER_BYTES, other=0).to(tl.int32)


@triton.jit
def _is_raw(message, n, size):
    return (_kind(message, size) == _RAW) & (size == HEADER_BYTES + 2 * n)


@triton.jit
def _is_whole(message, plan, wrong, words, size):
    """Whether a message is of kind CODED, and its words end where it ends."""
    told = (_kind(message, size) == CODED) & (tl.load(wrong) == 0)
    return told & (_places(plan)[1] + 2 * words == size)


@triton.jit(do_not_specialize=["row", "n", "most_tiles"], do_not_specialize_on_alignment=["messages"])
def sizes_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]
    plans,  # int64 [N, PLAN]
    sizes,  # int64 [N, most_tiles]: words of each tile; 0 for tiles that do not exist
    row: tl.int64,
    n: tl.int64,
    most_tiles: tl.int64,
):
    sender = tl.program_id(1).to(tl.int64)
    message, size = _message_of(messages, places, row, sender)
    plans += sender * PLAN
    tiles_at, words_at = _places(plans)
    log2_tile = tl.load(plans + LOG2_TILE)
    tile = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    there = (tile << log2_tile) < tl.where(words_at <= size, n, 0)
    counts = (message + tiles_at).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + tile, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(sizes + sender * most_tiles + tile, count, mask=tile < most_tiles)


@triton.jit(do_not_specialize=["row", "n", "most_tiles", "own"], do_not_specialize_on_alignment=["messages"])
def decode_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]
    shards,  # int16 [N, n]
    table,  # int32 [N, CONTEXTS, TOTAL]
    plans,  # int64 [N, PLAN]
    ends,  # int64 [N, most_tiles]: sums of tiles' words up to each
    wrong,  # int32 [N, 2]: 1 where tables are invalid; 0, set to 1 where words are not decoded to their end
    row: tl.int64,
    n: tl.int64,
    most_tiles: tl.int64,
    own,  # the shard that is not decoded
):
    sender = tl.program_id(1).to(tl.int64)
    message, size = _message_of(messages, places, row, sender)
    plans += sender * PLAN
    ends += sender * most_tiles
    weights = shards + sender * n
    table += sender * (CONTEXTS * TOTAL)
    wrong += 2 * sender
    all_words = tl.load(ends + most_tiles - 1)
    if (sender != own) & _is_raw(message, n, size):
        halves = (message + HEADER_BYTES).to(tl.pointer_type(tl.int16))
        start = tl.program_id(0).to(tl.int64) * (TILES * SMALLEST)
        for first in range(0, TILES * SMALLEST, _CHUNK):
            i = start + first + tl.arange(0, _CHUNK)
            tl.store(weights + i, tl.load(halves + i, mask=i < n, other=0), mask=i < n)
    if (sender != own) & _is_whole(message, plans, wrong, all_words, size):
        lanes, base = tl.load(plans + LANES).to(tl.int32), tl.load(plans + BASE).to(tl.int32)
        mantissa = tl.load(plans + MANTISSA).to(tl.int32)
        log2_tile = tl.load(plans + LOG2_TILE)
        tile, start, length, longest = _tiles_of_program(log2_tile, n)
        tiles = number_of_tiles(log2_tile, n)
        lane = tl.arange(0, WARP)[None, :]
        tiles_at, words_at = _places(plans)
        numbers = (message + tiles_at).to(tl.pointer_type(tl.int32))
        words = (message + words_at).to(tl.pointer_type(tl.int16))
        has = (length > 0) & (lane < lanes)
        x = tl.load(numbers + (tiles + tile * lanes + lane), mask=has, other=_FIRST_STATE)
        at = tl.load(ends + (tile - 1), mask=(length > 0) & (tile > 0), other=0)
        end = tl.load(ends + tile, mask=length > 0, other=0)
        i = lane
        for _ in range((longest + lanes - 1) // lanes):
            there = (lane < lanes) & (i < length)
            before = tl.load(weights + (start + i), mask=there, other=0).to(tl.int32)
            slot = context_of(before, mantissa, base) * TOTAL + (x & (TOTAL - 1))
            entry = tl.load(table + slot, mask=there, other=0)
            bits, low = (entry >> 29) & 7, (entry >> 20) & 511
            high = (x >> PRECISION) & _HIGH
            raw = high & ((1 << bits) - 1)
            moved = low + (raw >> 1)
            d = tl.where((raw & 1) != 0, -moved, moved)
            less = ((entry & (TOTAL - 1)) + 1) * (high >> bits) + ((entry >> PRECISION) & (TOTAL - 1))
            x = tl.where(there, less, x)
            escaped = (there & (low == ESCAPED)).to(tl.int32)
            needs = (there & (x < _FIRST_STATE)).to(tl.int32)
            taken = escaped + needs
            place = at + (tl.cumsum(taken, axis=1) - taken)
            more = place + escaped
            d = tl.where(
                escaped > 0,
                tl.load(words + place, mask=(escaped > 0) & (place < all_words), other=0).to(tl.int32),
                d,
            )
            word = tl.load(words + more, mask=(needs > 0) & (more < all_words), other=0).to(tl.int32)
            x = tl.where(needs > 0, (x << 16) | (word & 0xFFFF), x)
            after = line((line(before) + d).to(tl.int16).to(tl.int32))
            tl.store(weights + (start + i), after.to(tl.int16), mask=there)
            at += tl.sum(taken, 1)[:, None]
            i += lanes
        lost = tl.max(tl.where(has & (x != _FIRST_STATE), 1, 0)) + tl.max((at != end).to(tl.int32))
        tl.atomic_or(wrong + 1, 1, mask=lost > 0, sem="relaxed")


@triton.jit(do_not_specialize=["row", "n", "most_tiles", "own"], do_not_specialize_on_alignment=["messages"])
def verdict_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]
    plans,  # int64 [N, PLAN]
    ends,  # int64 [N, most_tiles]
    wrong,  # int32 [N, 2]
    sums,  # int64 [N, 2]: the sums of the decoded weights
    verdicts,  # int32 [N]
    row: tl.int64,
    n: tl.int64,
    most_tiles: tl.int64,
    own,
):
    sender = tl.program_id(0).to(tl.int64)
    message, size = _message_of(messages, places, row, sender)
    wrong += 2 * sender
    raw = _is_raw(message, n, size)
    words = tl.load(ends + (sender * most_tiles + most_tiles - 1))
    whole = _is_whole(message, plans + sender * PLAN, wrong, words, size)
    halves = (message + 4).to(tl.pointer_type(tl.int32))
    low = tl.load(halves, mask=size >= HEADER_BYTES, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(halves + 1, mask=size >= HEADER_BYTES, other=0).to(tl.int64)
    right = ((low | (high << 32)) == tl.load(sums + 2 * sender)) & (tl.load(wrong + 1) == 0)
    verdict = tl.where(right, 0, tl.where(raw, _MESSAGE_CHANGED, _WEIGHTS_DIFFER))
    verdict = tl.where(raw | whole, verdict, _MESSAGE_CHANGED)
    verdict = tl.where(sender == own, 0, verdict)
    tl.store(verdicts + sender, tl.where(_kind(message, size) == _STALE, _OWNER_CHANGED, verdict))
