"""What the weight code knows of a move d before it is sent: its context, and how frequent symbols are there.

A move is a symbol and some raw bits: 0 is d = 0, 1 to 40 are classes of size with the sign in the lowest raw
bit, and ESCAPE is any other d, which follows as a word. The context is the exponent of the old weight, in a
window of 16. In each context the frequencies are whole and add up to 1,024. docs/weight_code.md has the
rules.
"""

from __future__ import annotations

import numpy as np

CONTEXTS, PRECISION, TOTAL = 16, 10, 1024
_CLASSES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (9, 4), (13, 4), (17, 8), (25, 8)]
_CLASSES += [(low, 16) for low in range(33, 513, 16)]
ESCAPE = len(_CLASSES) + 1
SYMBOLS = ESCAPE + 1
FAR = 512
"""The largest |d| that has a class."""
LOWEST = np.array([0, *(low for low, _ in _CLASSES), 0])
RAW_BITS = np.array([0, *(width.bit_length() for _, width in _CLASSES), 0])
ESCAPE_BITS = 16
SYMBOL_OF = np.searchsorted(LOWEST[:ESCAPE], np.arange(FAR + 2), side="right") - 1
SYMBOL_OF[FAR + 1] = ESCAPE
"""The symbol of min(|d|, FAR + 1)."""
_FEW = 64
"""Counted weights that share a context with those of the next exponent above."""
ROW = 32
"""Weights that are counted together."""
_SAMPLED_FROM = 1 << 21
"""Weights of a shard: from here on one row of 8 is counted."""
LONG = 15
"""A context's 4 bits in a message's tables where a byte says more."""
SMALLEST_TILE, LARGEST_TILE, _TILE_BITS = 12, 18, 1 << 16
FEW_LANES, LANES = 8, 32
"""States of a tile."""


def sampled(numel: int) -> bool:
    """Whether not all weights are counted."""
    return numel >= _SAMPLED_FROM


def counted(numel: int) -> np.ndarray:
    """Which weights are counted: bool [numel]."""
    if not sampled(numel):
        return np.ones(numel, bool)
    row = np.arange(-(-numel // ROW), dtype=np.uint32)
    chosen = row % 8 == row // 8 * np.uint32(0x9E3779B1) >> np.uint32(29)
    return np.repeat(chosen, ROW)[:numel]


def window(exponents: np.ndarray) -> int:
    """`base`, given how often each exponent occurs, int64 [256].

    The window ends at the lowest exponent above which there is not one weight of 1,024. It begins 15 below,
    or higher where so few weights are below that tables of their own would not pay.
    """
    up_to = exponents.cumsum()
    top = int(np.argmax(1024 * (up_to[-1] - up_to) <= up_to[-1]))
    bottom = int(np.argmax(up_to > min(_FEW, int(up_to[-1]) - 1)))
    return max(top - CONTEXTS + 1, bottom)


def context(exponent: np.ndarray, base: int) -> np.ndarray:
    return np.clip(exponent - base, 0, CONTEXTS - 1)


def normalized(counts: np.ndarray, escapes: bool) -> np.ndarray:
    """Frequencies, int64 [CONTEXTS, SYMBOLS], of counts of the same shape.

    A symbol that occurs has its share of 1,024, rounded half up, and at least 1; symbol 0 has the rest. Where
    less than 1 remains for it, the most frequent other symbol (of equal ones the first) gives what is
    missing. Where `escapes`, since not all weights were counted, ESCAPE has at least 1 in every context.
    """
    every = np.maximum(counts.sum(1, keepdims=True), 1)
    found = np.where(counts > 0, np.maximum((2 * TOTAL * counts + every) // (2 * every), 1), 0)
    if escapes:
        found[:, ESCAPE] = np.maximum(found[:, ESCAPE], 1)
    found[:, 0] = 0
    rest = TOTAL - found.sum(1)
    found[np.arange(CONTEXTS), found.argmax(1)] -= np.maximum(1 - rest, 0)
    found[:, 0] = np.maximum(rest, 1)
    return found


def tile_and_lanes(numel: int, counts: np.ndarray, frequencies: np.ndarray) -> tuple[int, int]:
    """log2 of a tile's weights, and the states that a tile's weights are dealt to.

    A tile is to have 2^16 bits, beside which its own states are few; where the message has fewer, a tile has
    8. The mean bits of a weight are in 1/256, by a log2 that is interpolated between powers of 2, rounded
    down.
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
    """A message's tables, uint8: what each context lists, then the frequencies' lower and upper bits."""
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
    """The frequencies at the beginning of uint8 [bytes], and their bytes; None where no tables are."""
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
