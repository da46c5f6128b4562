"""The weight code's tables, computed on a GPU as weights/tables.py does.

    count_kernel        old, new     ->  counts of each symbol at each exponent, and the sums
    frequencies_kernel  counts       ->  each context's frequencies, and the bits that its moves cost
    list_kernel         frequencies  ->  the encoder's table, and the frequencies that a message lists
    front_kernel        numbers      ->  a message's header and tables, and the plan of its tiles
    read_kernel         messages     ->  the decoder's tables, and the plans of the messages' tiles

The tables' entries are described in weights/native/rans.h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_patch.weights import code, tables
from megatron_patch.weights.triton_kernels.sums import TILE, line, load_tile, sums_of

CONTEXTS = tl.constexpr(tables.CONTEXTS)
SYMBOLS = tl.constexpr(64)
"""The length of a row of counts or frequencies: the code's symbols, and zeros after them."""
EXPONENTS = tl.constexpr(256)
COPIES = tl.constexpr(16)
"""The number of copies of the counts: programs that add to the same number wait for each other."""
TOTAL = tl.constexpr(tables.TOTAL)
PRECISION = tl.constexpr(tables.PRECISION)
FAR = tl.constexpr(tables.FAR)
ESCAPE = tl.constexpr(tables.ESCAPE)
ESCAPED = tl.constexpr(511)
FRONT_BYTES = tl.constexpr(1024)
"""A length that a header and tables never exceed."""
CODED = tl.constexpr(code.CODED)
HEADER_BYTES = tl.constexpr(code.HEADER_BYTES)
LOG2_TILE, LANES, BASE, MANTISSA, TILES_AT, WORDS_AT = (tl.constexpr(place) for place in range(6))
PLAN = tl.constexpr(6)
"""The length of a message's plan, int64: log2 of a tile's weights, a tile's states, the window's first
exponent, the mantissa's bits, and the bytes after the header where counts and words begin."""
_LONG = tl.constexpr(tables.LONG)
_ESCAPE_BITS = tl.constexpr(tables.ESCAPE_BITS)
_SMALLEST, _LARGEST = tl.constexpr(tables.SMALLEST_TILE), tl.constexpr(tables.LARGEST_TILE)
_FEW_LANES, _MANY_LANES = tl.constexpr(tables.FEW_LANES), tl.constexpr(tables.LANES)
_HEADS = tl.constexpr(tables.CONTEXTS // 2)
_TILE_BITS = tl.constexpr(1 << 24)
"""The bits that a tile should have, in units of 1/256."""
_FEW = tl.constexpr(64)


@triton.jit
def difference(old, new):
    """Return d, int32, for weights' bits, int16 held in int32."""
    return (line(new) - line(old)).to(tl.int16).to(tl.int32)


@triton.jit
def context_of(bits, mantissa, base):
    return tl.minimum(tl.maximum(((bits & 0x7FFF) >> mantissa) - base, 0), CONTEXTS - 1)


@triton.jit
def number_of_tiles(log2_tile, n):
    return (n + (tl.full([], 1, tl.int64) << log2_tile) - 1) >> log2_tile


@triton.jit
def _symbol(size):
    """Return the symbol of |d|; a larger |d| than FAR is given as FAR + 1, whose symbol is ESCAPE."""
    symbol = tl.where(size <= 32, 9 + ((size - 17) >> 3), 11 + ((size - 33) >> 4))
    symbol = tl.where(size <= 16, 7 + ((size - 9) >> 2), symbol)
    symbol = tl.where(size <= 8, 5 + ((size - 5) >> 1), symbol)
    return tl.where(size <= 4, size, symbol)


@triton.jit
def _raw_bits(symbol):
    bits = tl.where(symbol <= 10, ((symbol - 3) >> 1) + 1, 5)
    bits = tl.where(symbol <= 4, tl.minimum(symbol, 1), bits)
    return tl.where(symbol == ESCAPE, 0, bits)


@triton.jit
def _lowest(symbol):
    """Return the lowest |d| of a symbol, or ESCAPED for the escape."""
    low = tl.where(symbol <= 10, 17 + ((symbol - 9) << 3), 33 + ((symbol - 11) << 4))
    low = tl.where(symbol <= 8, 9 + ((symbol - 7) << 2), low)
    low = tl.where(symbol <= 6, 5 + ((symbol - 5) << 1), low)
    low = tl.where(symbol <= 4, symbol, low)
    return tl.where(symbol == ESCAPE, ESCAPED, low)


@triton.jit(do_not_specialize=["n", "tiles"])
def count_kernel(
    old,  # int16 [n]
    new,  # int16 [n]
    counts,  # int32 [COPIES, EXPONENTS, SYMBOLS], zeros
    sums,  # int64 [4, tiles]: number of unchanged weights, both sums of old, the first sum of new
    n: tl.int64,
    tiles: tl.int64,
    MANTISSA_BITS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * TILE
    length = tl.minimum(n - start, TILE).to(tl.int32)
    before = load_tile(old + start, length)
    after = load_tile(new + start, length)
    d = difference(before, after)
    symbol = _symbol(tl.minimum(tl.abs(d), FAR + 1))
    i = tl.arange(0, TILE)
    counted = i < length
    if SAMPLED:
        row = (start >> 5) + (i >> 5)
        chosen = ((row >> 3).to(tl.uint32) * 0x9E3779B1) >> 29
        counted = counted & ((row & 7).to(tl.uint32) == chosen)
    copy = tile % COPIES * (EXPONENTS * SYMBOLS)
    place = copy + (((before & 0x7FFF) >> MANTISSA_BITS) * SYMBOLS + symbol)
    tl.atomic_add(counts + place, 1, mask=counted, sem="relaxed")
    old_first, old_second = sums_of(before, tile)
    new_first, _ = sums_of(after, tile)
    sums += tile
    tl.store(sums, (length - tl.sum((d != 0).to(tl.int32))).to(tl.int64))
    tl.store(sums + tiles, old_first)
    tl.store(sums + 2 * tiles, old_second)
    tl.store(sums + 3 * tiles, new_first)


@triton.jit
def _window(exponents):
    """Return the window's first exponent, and how many weights are counted."""
    e = tl.arange(0, EXPONENTS)
    at = tl.load(exponents + e)
    up_to = tl.cumsum(at, axis=0)
    counted = tl.sum(at)
    top = tl.min(tl.where((counted - up_to) * TOTAL <= counted, e, EXPONENTS - 1))
    bottom = tl.min(tl.where(up_to > tl.minimum(counted - 1, _FEW), e, EXPONENTS - 1))
    return tl.maximum(top - (CONTEXTS - 1), bottom), counted


@triton.jit
def frequencies_kernel(
    counts,  # int32 [COPIES, EXPONENTS, SYMBOLS]
    exponents,  # int64 [EXPONENTS]: how many weights of each exponent are counted
    frequencies,  # int32 [CONTEXTS, SYMBOLS]
    starts,  # int32 [CONTEXTS, SYMBOLS]: for each symbol the sum of the frequencies of those before it
    costs,  # int64 [CONTEXTS]: bits that the counted moves cost, in units of 1/256
    SAMPLED: tl.constexpr,
):
    mine = tl.program_id(0).to(tl.int64)
    base, _ = _window(exponents)
    s = tl.arange(0, SYMBOLS)
    rows = tl.arange(0, COPIES)
    occurrences = tl.zeros((SYMBOLS,), tl.int64)
    first = tl.where(mine == 0, 0, base + mine)
    behind = tl.where(mine == CONTEXTS - 1, EXPONENTS, tl.minimum(base + mine + 1, EXPONENTS))
    for exponent in range(first, behind):
        at = rows[:, None] * (EXPONENTS * SYMBOLS) + exponent * SYMBOLS + s[None, :]
        occurrences += tl.sum(tl.load(counts + at).to(tl.int64), 0)
    every = tl.maximum(tl.sum(occurrences), 1)
    share = ((occurrences * (2 * TOTAL) + every) // (2 * every)).to(tl.int32)
    f = tl.where(occurrences > 0, tl.maximum(share, 1), 0)
    if SAMPLED:
        f = tl.where(s == ESCAPE, tl.maximum(f, 1), f)
    f = tl.where(s == 0, 0, f)
    rest = TOTAL - tl.sum(f)
    # This is the largest frequency's symbol; of equal frequencies it is the first.
    most = SYMBOLS - 1 - (tl.max(f * SYMBOLS + (SYMBOLS - 1 - s)) & (SYMBOLS - 1))
    f -= tl.where(s == most, tl.maximum(1 - rest, 0), 0)
    f = tl.where(s == 0, tl.maximum(rest, 1), f)
    tl.store(frequencies + mine * SYMBOLS + s, f)
    tl.store(starts + mine * SYMBOLS + s, tl.cumsum(f, axis=0) - f)
    by_escape = (f == 0) | (s == ESCAPE)
    said = tl.maximum(tl.where(by_escape, tl.sum(tl.where(s == ESCAPE, f, 0)), f), 1)
    power = (said.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    log2 = (power << 8) + (((said - (1 << power)) << 8) >> power)
    cost = ((tl.where(by_escape, _ESCAPE_BITS, _raw_bits(s)) + PRECISION) << 8) - log2
    tl.store(costs + mine, tl.sum(occurrences * cost.to(tl.int64)))


@triton.jit
def _listed(frequencies):
    """Return each context's last listed symbol, and whether the escape is listed; int32 [CONTEXTS]."""
    s = tl.arange(0, SYMBOLS)[None, :]
    f = tl.load(frequencies + tl.arange(0, CONTEXTS)[:, None] * SYMBOLS + s)
    last = tl.max(tl.where((f > 0) & (s < ESCAPE), s, 0), 1)
    return last, tl.max(tl.where((f > 0) & (s == ESCAPE), 1, 0), 1)


@triton.jit
def _of(values, mine):
    """Return element `mine` of int32 [CONTEXTS]."""
    return tl.sum(tl.where(tl.arange(0, CONTEXTS) == mine, values, 0))


@triton.jit
def list_kernel(
    frequencies,  # int32 [CONTEXTS, SYMBOLS]
    starts,  # int32 [CONTEXTS, SYMBOLS]
    table,  # int32 [CONTEXTS, TOTAL]: the encoder's table
    numbers,  # int32 [TOTAL], zeros: the frequencies that a message lists
):
    mine = tl.program_id(0).to(tl.int64)
    last, escapes = _listed(frequencies)
    first = _of(tl.cumsum(last + escapes, axis=0) - last - escapes, mine)
    escape, end = _of(escapes, mine), _of(last, mine)
    frequencies += mine * SYMBOLS
    starts += mine * SYMBOLS
    s = tl.arange(0, SYMBOLS)
    f = tl.load(frequencies + s)
    tl.store(numbers + first + escape + s - 1, f, mask=(s >= 1) & (s <= end))
    tl.store(numbers + first + s - ESCAPE, f, mask=(s >= ESCAPE) & (s < ESCAPE + escape))
    size = tl.arange(0, TOTAL)
    symbol = _symbol(tl.minimum(size, FAR + 1))
    symbol = tl.where(tl.load(frequencies + symbol) > 0, symbol, ESCAPE)
    entry = ((tl.load(frequencies + symbol) - 1) & (TOTAL - 1)) | (tl.load(starts + symbol) << PRECISION)
    entry |= (_raw_bits(symbol) << 20) | ((symbol == ESCAPE).to(tl.int32) << 23)
    tl.store(table + mine * TOTAL + size, entry)


@triton.jit(do_not_specialize=["n"])
def front_kernel(
    exponents,  # int64 [EXPONENTS]
    frequencies,  # int32 [CONTEXTS, SYMBOLS]
    numbers,  # int32 [TOTAL]
    costs,  # int64 [CONTEXTS]
    front,  # uint8 [FRONT_BYTES], zeros: a message's header, without the sum, and its tables
    plan,  # int64 [PLAN]
    n: tl.int64,
    MANTISSA_BITS: tl.constexpr,
):
    base, counted = _window(exponents)
    mean = tl.sum(tl.load(costs + tl.arange(0, CONTEXTS))) // counted
    log2_tile = tl.full([], _SMALLEST, tl.int64)
    for _ in tl.static_range(_LARGEST - _SMALLEST):
        log2_tile += ((mean << log2_tile) < _TILE_BITS).to(tl.int64)
    few = mean * n < _TILE_BITS
    lanes = tl.where(few, _FEW_LANES, _MANY_LANES)
    form = log2_tile.to(tl.int32) - _SMALLEST + tl.where(few, 8, 0) + tl.where(MANTISSA_BITS == 10, 16, 0)
    tl.store(front, CODED)
    tl.store(front + 1, base.to(tl.uint8))
    tl.store(front + 2, form.to(tl.uint8))
    last, escapes = _listed(frequencies)
    is_long = ((escapes > 0) | (last >= _LONG)).to(tl.int32)
    at = front + HEADER_BYTES
    low, high = tl.split(tl.reshape(tl.where(is_long > 0, _LONG, last), (_HEADS, 2)))
    tl.store(at + tl.arange(0, _HEADS), (low | (high << 4)).to(tl.uint8))
    at += _HEADS
    place = tl.cumsum(is_long, axis=0) - 1
    tl.store(at + place, (last | (escapes << 7)).to(tl.uint8), mask=is_long > 0)
    longs, listed = tl.sum(is_long), tl.sum(last + escapes)
    at += longs
    k = tl.arange(0, TOTAL)
    number = tl.load(numbers + k)  # It is 0 after the last listed frequency.
    tl.store(at + k, number.to(tl.uint8), mask=k < listed)
    upper = tl.reshape((number >> 8) << ((k & 3) * 2), (TOTAL // 4, 4))
    byte = tl.arange(0, TOTAL // 4)
    tl.store(at + listed + byte, tl.sum(upper, 1).to(tl.uint8), mask=byte * 4 < listed)
    size = (_HEADS + longs + listed + (listed + 3) // 4 + 3) // 4 * 4
    tiles = number_of_tiles(log2_tile, n)
    tl.store(plan + LOG2_TILE, log2_tile)
    tl.store(plan + LANES, lanes)
    tl.store(plan + BASE, base)
    tl.store(plan + MANTISSA, MANTISSA_BITS)
    tl.store(plan + TILES_AT, size)
    tl.store(plan + WORDS_AT, size + 4 * tiles * (1 + lanes))


@triton.jit
def _byte(message, at, readable):
    return tl.load(message + at, mask=readable, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["row", "n"], do_not_specialize_on_alignment=["messages"])
def read_kernel(
    messages,  # uint8 [N, row]
    places,  # int64 [N, 2]: where in its row a message begins, and its bytes
    table,  # int32 [N, CONTEXTS, TOTAL]: the decoder's tables
    plans,  # int64 [N, PLAN]
    wrong,  # int32 [N, 2], zeros: the first number is set to 1 if the message's tables are invalid
    row: tl.int64,
    n: tl.int64,
    SLOTS: tl.constexpr,  # the number of the table's slots that are filled at a time
):
    mine, sender = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message = messages + sender * row + tl.load(places + 2 * sender)
    size = tl.load(places + 2 * sender + 1)
    body, room = message + HEADER_BYTES, size - HEADER_BYTES
    c = tl.arange(0, CONTEXTS)
    head = (_byte(body, c >> 1, (c >> 1) < room) >> ((c & 1) * 4)) & 15
    is_long = (head == _LONG).to(tl.int32)
    place = _HEADS + tl.cumsum(is_long, axis=0) - is_long
    byte = _byte(body, place, (is_long > 0) & (place < room))
    last, escapes = tl.where(is_long > 0, byte & 127, head), tl.where(is_long > 0, byte >> 7, 0)
    begin, listed = _HEADS + tl.sum(is_long), tl.sum(last + escapes)
    end = begin + listed + (listed + 3) // 4
    right = (end <= room) & (tl.max(last) < ESCAPE)
    first = _of(tl.cumsum(last + escapes, axis=0) - last - escapes, mine)
    escape, highest = _of(escapes, mine), _of(last, mine)
    s = tl.arange(0, SYMBOLS)
    k = first + tl.where(s == ESCAPE, 0, escape + s - 1)
    escape, highest = tl.where(right, escape, 0), tl.where(right, highest, 0)
    there = ((s >= 1) & (s <= highest)) | ((s >= ESCAPE) & (s < ESCAPE + escape))
    upper = _byte(body, begin + listed + (k >> 2), there) >> ((k & 3) * 2)
    f = _byte(body, begin + k, there) | ((upper & 3) << 8)
    rest = TOTAL - tl.sum(f)
    ends = tl.cumsum(tl.where(s == 0, rest, f), axis=0)
    for start in range(0, TOTAL, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        before = ends[None, :] <= slot[:, None]
        symbol = tl.minimum(tl.sum(before.to(tl.int32), 1), ESCAPE)
        low = tl.max(tl.where(before, ends[None, :], 0), 1)
        high = tl.min(tl.where(before, TOTAL, ends[None, :]), 1)
        entry = ((high - low - 1) & (TOTAL - 1)) | (((slot - low) & (TOTAL - 1)) << PRECISION)
        entry |= (_lowest(symbol) << 20) | (_raw_bits(symbol) << 29)
        tl.store(table + (sender * CONTEXTS + mine) * TOTAL + slot, entry)
    base, form = _byte(message, 1, size >= HEADER_BYTES), _byte(message, 2, size >= HEADER_BYTES)
    log2_tile = (form & 7) + _SMALLEST
    right = right & (rest > 0) & (form < 32) & (log2_tile <= _LARGEST)
    tl.atomic_or(wrong + 2 * sender, 1, mask=right == 0, sem="relaxed")
    if mine == 0:
        lanes = tl.where((form & 8) != 0, _FEW_LANES, _MANY_LANES)
        tiles = number_of_tiles(log2_tile, n)
        at = (end + 3) // 4 * 4
        plans += sender * PLAN
        tl.store(plans + LOG2_TILE, log2_tile)
        tl.store(plans + LANES, lanes)
        tl.store(plans + BASE, base)
        tl.store(plans + MANTISSA, tl.where((form & 16) != 0, 10, 7))
        tl.store(plans + TILES_AT, at)
        tl.store(plans + WORDS_AT, at + 4 * tiles * (1 + lanes))
