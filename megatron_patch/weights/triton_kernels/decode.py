"""The weight code's decoder: in place, in one pass over the weights; the CPU looks at nothing.

    message_sizes_kernel  counts             ->  sizes, and from their sums the place of every piece
    apply_kernel          messages, weights  ->  weights, the two sums of each tile
    verdict_kernel        sums               ->  found

Each is launched once for all messages of a bucket, one from every sender.

Codes are read where they are: a code's rank, a sum over those before it, says in which byte. Nothing is read
that is not in the message, whatever its bytes are: `_is_whole` holds for every tile or for none, and where it
does, pieces lie in the message one behind another; of a piece, ranks above its count are not read.

A weight depends on the message and on what it was itself, and on no other weight: its program reads it once,
and writes it then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.weights import code as weight_code
from megatron_patch.weights.triton_kernels.tiles import (
    NO_BITMAP,
    TILE,
    count_of,
    line,
    load_tile,
    sums_of,
    write_sizes,
)

_CODED = tl.constexpr(weight_code.CODED)
_RAW = tl.constexpr(weight_code.RAW)
_STALE = tl.constexpr(weight_code.STALE)
_HEADER_BYTES = tl.constexpr(weight_code.HEADER_BYTES)
_WEIGHTS_DIFFER = tl.constexpr(weight_code.WEIGHTS_DIFFER)
_MESSAGE_CHANGED = tl.constexpr(weight_code.MESSAGE_CHANGED)
_OWNER_CHANGED = tl.constexpr(weight_code.OWNER_CHANGED)


@triton.jit
def _message_of(messages, places, row):
    """This program's message, the program_id(1)-th, and its bytes."""
    sender = tl.program_id(1).to(tl.int64)
    return messages + sender * row + tl.load(places + 2 * sender), tl.load(places + 2 * sender + 1)


@triton.jit
def _number(message, at, size):
    """A number of the header; 0 of a message that has none."""
    return tl.load(message.to(tl.pointer_type(tl.int64)) + at, mask=size >= _HEADER_BYTES, other=0)


@triton.jit
def _is_raw(message, n, size):
    """Whether a message holds n weights themselves."""
    told = (_number(message, 0, size) == _RAW) & (_number(message, 1, size) == n)
    return told & (size == _HEADER_BYTES + 2 * n)


@triton.jit
def _is_whole(message, wrong, end, n, size):
    """Whether it holds n coded weights, whose pieces end where it ends."""
    told = (_number(message, 0, size) == _CODED) & (_number(message, 1, size) == n)
    return told & (tl.load(wrong) == 0) & (tl.load(end) == size)


@triton.jit
def _unzigzag(z):
    return tl.where((z & 1) != 0, -2 - (z >> 1), 2 + (z >> 1))


@triton.jit
def _codes_of(piece, length, BITS: tl.constexpr):
    """A tile's codes that have known places, int32 [TILE]: 0 from `length` on."""
    PER_BYTE: tl.constexpr = 8 // BITS
    i = tl.arange(0, TILE)
    byte = tl.load(piece + i // PER_BYTE, mask=i < length, other=0).to(tl.int32)
    return (byte >> (i % PER_BYTE * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _code_at(piece, rank, count, said, BITS: tl.constexpr):
    """The code of each weight for which `said` holds, the `rank`-th of `count` from 1 on; 0 of the others."""
    PER_BYTE: tl.constexpr = 8 // BITS
    at = rank - 1
    byte = tl.load(piece + at // PER_BYTE, mask=said & (rank <= count), other=0).to(tl.int32)
    return (byte >> ((at & (PER_BYTE - 1)) * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _difference(message, counts, places, tiles, length):
    """d of a tile's weights, and whether its pieces hold as many codes as its counts say."""
    count = count_of(counts, 0, 0, True)
    far_count = count_of(counts, 0, 1, True)
    farther_count = count_of(counts, 0, 2, True)
    farthest_count = count_of(counts, 0, 3, True)
    first_piece = message + tl.load(places + tiles)
    if count != NO_BITMAP:
        said = _codes_of(message + tl.load(places), length, 1)
        rank = tl.cumsum(said, axis=0)
        right = tl.max(rank) == count
        first = _code_at(first_piece, rank, count, said > 0, 2)
    else:
        right = length > 0
        first = _codes_of(first_piece, length, 2)
    d = tl.where(first == 2, -1, first)
    far = (first + 1) >> 2  # 1 where it is 3, else 0
    right = right & (tl.sum(far) == far_count)
    if far_count > 0:
        rank = tl.cumsum(far, axis=0)
        z = _code_at(message + tl.load(places + 2 * tiles), rank, far_count, far > 0, 4)
        farther = (z + 1) >> 4
        right = right & (tl.sum(farther) == farther_count)
        farthest = tl.zeros_like(far)
        if farther_count > 0:
            rank = tl.cumsum(farther, axis=0)
            more = _code_at(message + tl.load(places + 3 * tiles), rank, farther_count, farther > 0, 8)
            z += more
            farthest = (more + 1) >> 8
            right = right & (tl.sum(farthest) == farthest_count)
        d = tl.where(far > 0, _unzigzag(z), d)
        if farthest_count > 0:
            rank = tl.cumsum(farthest, axis=0)
            sixteens = message + tl.load(places + 4 * tiles)  # at any byte
            readable = (farthest > 0) & (rank <= farthest_count)
            low = tl.load(sixteens + (2 * rank - 2), mask=readable, other=0).to(tl.int32)
            high = tl.load(sixteens + (2 * rank - 1), mask=readable, other=0).to(tl.int32)
            d = tl.where(farthest > 0, low | (high << 8), d)  # mod 2^16, as it is added
    return d, right


@triton.jit(do_not_specialize=["row", "n", "tiles"], do_not_specialize_on_alignment=["messages"])
def message_sizes_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]: where in its row a message begins, and its bytes
    sizes,  # int64 [N, 1 + 5 * tiles]: of what is before the planes, and of each piece
    wrong,  # int32 [N, 2], zeros
    row: tl.int64,
    n: tl.int64,
    tiles: tl.int64,
):
    message, size = _message_of(messages, places, row)
    sender = tl.program_id(1).to(tl.int64)
    sizes += sender * (1 + 5 * tiles)
    if tl.program_id(0) == 0:
        tl.store(sizes, 8 * tiles + _HEADER_BYTES)
    whole = tl.minimum((size - _HEADER_BYTES) // 8, tiles)  # below 0 none
    counts = (message + _HEADER_BYTES).to(tl.pointer_type(tl.int16))
    write_sizes(counts, sizes + 1, wrong + 2 * sender, n, tiles, whole)


@triton.jit(do_not_specialize=["row", "n", "tiles", "own"], do_not_specialize_on_alignment=["messages"])
def apply_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]: where in its row a message begins, and its bytes
    shards,  # int16 [N, n]
    pieces,  # int64 [N, 5 * tiles + 1]: where each piece begins, and where the last one ends
    wrong,  # int32 [N, 2]: whether counts contradict each other; 0, and 1 where codes contradict counts
    sums,  # int64 [N, 2, tiles], zeros: of the weights afterwards
    row: tl.int64,
    n: tl.int64,
    tiles: tl.int64,
    own,  # whose weights are left alone
    SIXTEENS: tl.constexpr,  # n is a multiple of 16: shards begin where wide loads may
):
    tile = tl.program_id(0).to(tl.int64)
    sender = tl.program_id(1).to(tl.int64)
    message, size = _message_of(messages, places, row)
    first = sender * n
    if SIXTEENS:
        first = tl.multiple_of(first, 16)
    weights = shards + first
    pieces += sender * (5 * tiles + 1)
    wrong += 2 * sender
    sums += 2 * sender * tiles
    start = tile * TILE
    length = tl.minimum(n - start, TILE).to(tl.int32)
    raw = _is_raw(message, n, size)
    if (sender != own) & (raw | _is_whole(message, wrong, pieces + 5 * tiles, n, size)):
        halves = (message + _HEADER_BYTES).to(tl.pointer_type(tl.int16))
        before = load_tile(weights + start, length)
        if raw:
            after = load_tile(halves + start, length)
            right = length > 0
        else:
            d, right = _difference(message, halves + 4 * tile, pieces + tile, tiles, length)
            after = line((line(before) + d).to(tl.int16).to(tl.int32))
        i = tl.arange(0, TILE)
        if right == 0:
            tl.atomic_or(wrong + 1, 1, sem="relaxed")
        elif length == TILE:
            tl.store(weights + start + i, after.to(tl.int16))
        else:
            tl.store(weights + start + i, after.to(tl.int16), mask=i < length)
        one, other = sums_of(after, tile)  # what is behind the last weight is 0
        tl.store(sums + tile, one)
        tl.store(sums + tiles + tile, other)


@triton.jit(do_not_specialize=["row", "n", "tiles", "own"], do_not_specialize_on_alignment=["messages"])
def verdict_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]
    pieces,  # int64 [N, 5 * tiles + 1]
    wrong,  # int32 [N, 2]
    sums,  # int64 [N, 2]
    found,  # int32 [N]
    row: tl.int64,
    n: tl.int64,
    tiles: tl.int64,
    own,
):
    sender = tl.program_id(0).to(tl.int64)
    size = tl.load(places + 2 * sender + 1)
    message = messages + sender * row + tl.load(places + 2 * sender)
    end = pieces + sender * (5 * tiles + 1) + 5 * tiles
    wrong += 2 * sender
    raw = _is_raw(message, n, size)
    whole = _is_whole(message, wrong, end, n, size) & (tl.load(wrong + 1) == 0)
    one = _number(message, 5, size) == tl.load(sums + 2 * sender)
    other = _number(message, 6, size) == tl.load(sums + 2 * sender + 1)
    verdict = tl.where(one & other, 0, tl.where(raw, _MESSAGE_CHANGED, _WEIGHTS_DIFFER))
    verdict = tl.where(raw | whole, verdict, _MESSAGE_CHANGED)
    verdict = tl.where(sender == own, 0, verdict)
    tl.store(found + sender, tl.where(_number(message, 0, size) == _STALE, _OWNER_CHANGED, verdict))
