"""The symbols and contexts of the weight code, and the frequencies of symbols in each context.

A move d (the change of a weight, code.py) is coded as a symbol and some raw bits: symbol 0 is d = 0, symbols
1 to 40 are classes of |d| with the sign in the lowest raw bit, and ESCAPE is any other d, which follows as a
word. The context is the exponent of the old weight, in a window of 16 exponents. In each context the
frequencies are whole numbers that add up to 1,024. docs/weight_code.md has the rules.
"""

from __future__ import annotations

import numpy as np

CONTEXTS, PRECISION, TOTAL = 16, 10, 1024
_CLASSES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (9, 4), (13, 4), (17, 8), (25, 8)]
_CLASSES += [(low, 16) for low in range(33, 513, 16)]
ESCAPE = len(_CLASSES) + 1
SYMBOLS = ESCAPE + 1
FAR = 512
"""The largest |d| of a class; larger ones are sent as ESCAPE."""
LOWEST = np.array([0, *(low for low, _ in _CLASSES), 0])
RAW_BITS = np.array([0, *(width.bit_length() for _, width in _CLASSES), 0])
ESCAPE_BITS = 16
SYMBOL_OF = np.searchsorted(LOWEST[:ESCAPE], np.arange(FAR + 2), side="right") - 1
SYMBOL_OF[FAR + 1] = ESCAPE
"""The symbol of min(|d|, FAR + 1)."""
_FEW = 64
"""The window begins no lower than the exponent up to which more weights than this are counted."""
ROW = 32
"""The weights of a row; a row is counted as a whole or not at all."""
_SAMPLED_FROM = 1 << 21
"""In a shard of this many weights or more, one row of 8 is counted."""
LONG = 15
"""The value of a context's 4 bits in a message's tables if a byte of its own follows."""
SMALLEST_TILE, LARGEST_TILE, _TILE_BITS = 12, 18, 1 << 16
FEW_LANES, LANES = 8, 32
"""The two numbers of states that a tile may have."""


def sampled(numel: int) -> bool:
    """Whether only some of the weights are counted."""
    return numel >= _SAMPLED_FROM


def counted(numel: int) -> np.ndarray:
    """Return which weights are counted: bool [numel]."""
    if not sampled(numel):
        return np.ones(numel, bool)
    row = np.arange(-(-numel // ROW), dtype=np.uint32)
    chosen = row % 8 == row // 8 * np.uint32(0x9E3779B1) >> np.uint32(29)
    return np.repeat(chosen, ROW)[:numel]


def window(exponents: np.ndarray) -> int:
    """Return `base`, the first exponent of the window, given each exponent's count, int64 [256].

    The window ends at the lowest exponent above which there are at most 1/1024 of the weights. It begins 15
    below, or higher if the weights below are too few to be worth tables of their own.
    """
    up_to = exponents.cumsum()
    top = int(np.argmax(1024 * (up_to[-1] - up_to) <= up_to[-1]))
    bottom = int(np.argmax(up_to > min(_FEW, int(up_to[-1]) - 1)))
    return max(top - CONTEXTS + 1, bottom)


def context(exponent: np.ndarray, base: int) -> np.ndarray:
    return np.clip(exponent - base, 0, CONTEXTS - 1)


def normalized(counts: np.ndarray, escapes: bool) -> np.ndarray:
    """Return frequencies, int64 [CONTEXTS, SYMBOLS], for counts of the same shape.

    A symbol that occurs gets its share of 1,024, rounded half up, and at least 1; symbol 0 gets the rest. If
    less than 1 is left for symbol 0, the most frequent other symbol (of equal ones the first) is reduced by
    what is missing. With `escapes`, if not all weights were counted, ESCAPE gets at least 1 in all contexts.
    """
    every = np.maximum(counts.sum(1, keepdims=True), 1)
    frequencies = np.where(counts > 0, np.maximum((2 * TOTAL * counts + every) // (2 * every), 1), 0)
    if escapes:
        frequencies[:, ESCAPE] = np.maximum(frequencies[:, ESCAPE], 1)
    frequencies[:, 0] = 0
    rest = TOTAL - frequencies.sum(1)
    frequencies[np.arange(CONTEXTS), frequencies.argmax(1)] -= np.maximum(1 - rest, 0)
    frequencies[:, 0] = np.maximum(rest, 1)
    return frequencies


def tile_and_lanes(numel: int, counts: np.ndarray, frequencies: np.ndarray) -> tuple[int, int]:
    """Return log2 of a tile's weights, and the number of its states.

    A tile should have 2^16 bits, so that its states take few bits beside them; if the whole message has
    fewer, a tile has 8 states. The mean bits per weight are computed in units of 1/256, rounded down, with a
    log2 that is interpolated between powers of 2.
    """
    by_escape = (frequencies == 0) | (np.arange(SYMBOLS) == ESCAPE)
    said = np.maximum(np.where(by_escape, frequencies[:, ESCAPE:], frequencies), 1)
    power = np.frexp(said)[1].astype(np.int64) - 1
    log2 = (power << 8) + ((said - (1 << power) << 8) >> power)
    cost = (PRECISION + np.where(by_escape, ESCAPE_BITS, RAW_BITS) << 8) - log2
    mean = int((counts * cost).sum() // counts.sum())
    tile = SMALLEST_TILE
    while tile < LARGEST_TILE and mean << tile < _TILE_BITS << 8:
        tile += 1
    return tile, FEW_LANES if mean * numel < _TILE_BITS << 8 else LANES


def written(frequencies: np.ndarray) -> np.ndarray:
    """Return a message's tables, uint8: which symbols each context lists, then the lower bits of their
    frequencies, then the upper bits."""
    used = frequencies[:, 1:ESCAPE] > 0
    last = np.where(used.any(1), ESCAPE - 1 - used[:, ::-1].argmax(1), 0)
    escapes = (frequencies[:, ESCAPE] > 0).astype(np.int64)
    heads = np.where((last < LONG) & (escapes == 0), last, LONG)
    listed = zip(frequencies, last.tolist(), escapes.tolist(), strict=True)
    numbers = np.concatenate([[*row[ESCAPE:][:escape], *row[1 : end + 1]] for row, end, escape in listed])
    numbers = numbers.astype(np.int64)
    upper = np.append(numbers >> 8, np.zeros(-len(numbers) % 4, np.int64)).reshape(-1, 4)
    pieces = heads[::2] | heads[1::2] << 4, (last | escapes << 7)[heads == LONG], numbers & 0xFF
    return np.concatenate([*pieces, (upper << 2 * np.arange(4)).sum(1)]).astype(np.uint8)


def read(message: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Read tables at the beginning of uint8 [bytes]: returns frequencies and bytes read; None if invalid."""
    if len(message) < CONTEXTS // 2:
        return None
    last = (
        np.stack([message[: CONTEXTS // 2] & 15, message[: CONTEXTS // 2] >> 4], 1)
        .reshape(-1)
        .astype(np.int64)
    )
    long = last == LONG
    size = CONTEXTS // 2 + int(long.sum())
    if len(message) < size:
        return None
    last[long] = message[CONTEXTS // 2 : size]
    last, escapes = last & 0x7F, last >> 7
    count = int((last + escapes).sum())
    lower, upper = message[size : size + count], message[size + count : size + count + -(-count // 4)]
    size += count + -(-count // 4)
    if len(message) < size or (last >= ESCAPE).any():
        return None
    numbers = lower + ((upper.astype(np.int64)[:, None] >> 2 * np.arange(4) & 3).reshape(-1)[:count] << 8)
    frequencies = np.zeros((CONTEXTS, SYMBOLS), np.int64)
    at = 0
    for row, end, escape in zip(frequencies, last.tolist(), escapes.tolist(), strict=True):
        row[ESCAPE] = numbers[at] if escape else 0
        row[1 : end + 1] = numbers[at + escape : at + escape + end]
        at += escape + end
    frequencies[:, 0] = TOTAL - frequencies.sum(1)
    return (frequencies, size) if (frequencies[:, 0] > 0).all() else None
