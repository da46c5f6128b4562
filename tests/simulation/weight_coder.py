"""A second encoder of the weight code, written from docs/weight_code.md without the package's code.

Weights are lists of 16-bit patterns, 0 to 65535, and messages are lists of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from simulation.weight_sums import first_sum

ESCAPE, CONTEXTS, TOTAL = 41, 16, 1024
LOWEST, BITS = [0], [0]
"""The lowest |d| of every symbol but the escape, and how many raw bits follow."""
for _b, _classes in ((1, 4), (2, 2), (3, 2), (4, 2), (5, 30)):
    for _ in range(_classes):
        LOWEST.append(LOWEST[-1] + max(1 << BITS[-1] >> 1, 1))
        BITS.append(_b)
SYMBOL_OF = np.array([max(s for s in range(ESCAPE) if LOWEST[s] <= size) for size in range(513)] + [ESCAPE])
"""By |d|, where 513 stands for all that are larger."""


def encode(old: list[int], new: list[int], fp16: bool) -> list[int]:
    header, body = _coded(old, new, fp16)
    if len(body) >= 2 * len(new):
        header, body = [71, 0, 0, 0], b"".join(x.to_bytes(2, "little") for x in new)
    return [*header, *first_sum(new).to_bytes(8, "little"), *body]


def entropy(old: list[int] | np.ndarray, new: list[int] | np.ndarray, fp16: bool) -> float:
    """Bits of all d together, by how often each one is among the old weights of an exponent."""
    x, y = (np.asarray(one).astype(np.int64) & 0xFFFF for one in (old, new))
    exponents = _exponents(x, fp16)
    pairs = np.unique(exponents * 0x10000 + (_differences(x, y) & 0xFFFF), return_counts=True)[1]
    weights = np.unique(exponents, return_counts=True)[1]
    return float((weights * np.log2(weights)).sum() - (pairs * np.log2(pairs)).sum())


# --- Moves -----------------------------------------------------------------------------------------------


def _lines(x: np.ndarray) -> np.ndarray:
    """Each pattern's place, which is one of 0 to 65535 as well; they stand for themselves modulo 2^16."""
    return np.where(x & 0x8000, x ^ 0x7FFF, x)


def _differences(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """-32768 to 32767."""
    return (_lines(y) - _lines(x) + 0x8000) % 0x10000 - 0x8000


def _exponents(x: np.ndarray, fp16: bool) -> np.ndarray:
    return (x & 0x7FFF) >> (10 if fp16 else 7)


def _contexts(exponents: np.ndarray, base: int) -> list[int]:
    return np.clip(exponents - base, 0, 15).tolist()


# --- Frequencies -----------------------------------------------------------------------------------------


def _counted(n: int) -> np.ndarray:
    """Which of n weights are counted."""
    i = np.arange(n)
    if n < 1 << 21:
        return i >= 0
    return i // 32 % 8 == (i // 256 * 0x9E3779B1 % (1 << 32)) // (1 << 29)


def _base(exponents: np.ndarray) -> int:
    """The window's beginning, by the counted weights' exponents."""
    upto = np.bincount(exponents, minlength=256).cumsum().tolist()
    counted = len(exponents)
    top = next(e for e in range(256) if 1024 * (counted - upto[e]) <= counted)
    bottom = next(e for e in range(256) if upto[e] > min(64, counted - 1))
    return max(top - 15, bottom)


def _frequencies(counts: list[int], some_are_not_counted: bool) -> list[int]:
    """Those of a context's 42 symbols."""
    c = sum(counts)
    f = [max((2048 * count + c) // (2 * c), 1) if count else 0 for count in counts]
    if some_are_not_counted:
        f[ESCAPE] = max(f[ESCAPE], 1)
    f[0] = TOTAL - sum(f[1:])
    if f[0] < 1:
        f[1 + f[1:].index(max(f[1:]))] -= 1 - f[0]
        f[0] = 1
    return f


def _tables(frequencies: list[list[int]]) -> bytes:
    last = [max(s for s in range(ESCAPE) if s == 0 or f[s]) for f in frequencies]
    small = [s < 15 and not f[ESCAPE] for s, f in zip(last, frequencies, strict=True)]
    nibbles = [s if short else 15 for s, short in zip(last, small, strict=True)]
    written = [nibbles[k] + 16 * nibbles[k + 1] for k in range(0, CONTEXTS, 2)]
    numbers = []
    for s, short, f in zip(last, small, frequencies, strict=True):
        if not short:
            written.append(s + 128 * (f[ESCAPE] > 0))
        numbers += [f[ESCAPE]] * (f[ESCAPE] > 0) + f[1 : s + 1]
    written += [number % 256 for number in numbers]
    upper = [number // 256 for number in numbers] + [0, 0, 0]
    written += [
        upper[k] + 4 * upper[k + 1] + 16 * upper[k + 2] + 64 * upper[k + 3] for k in range(0, len(numbers), 4)
    ]
    return bytes(written) + bytes(-len(written) % 4)


def _end_of_tables(message: list[int]) -> int:
    """Where the zeros behind the tables end."""
    at, total = 20, 0
    for k in range(CONTEXTS):
        form = message[12 + k // 2] >> 4 * (k % 2) & 15
        if form == 15:
            form, at = message[at], at + 1
        total += form % 128 + form // 128
    end = at + total + -(-total // 4)
    return end + -end % 4


# --- Tiles -----------------------------------------------------------------------------------------------


def _logarithm(v: int) -> int:
    """About 256 * log2 v."""
    k = v.bit_length() - 1
    return 256 * k + ((v - (1 << k)) * 256 >> k)


def _mean(counts: list[list[int]], frequencies: list[list[int]]) -> int:
    total = 0
    for row, f in zip(counts, frequencies, strict=True):
        for s, count in enumerate(row):
            escapes = s == ESCAPE or f[s] == 0
            if count:
                total += count * (
                    256 * (10 + (16 if escapes else BITS[s])) - _logarithm(f[ESCAPE] if escapes else f[s])
                )
    return total // sum(map(sum, counts))


def _tiles(n: int, mean: int) -> tuple[int, int]:
    """The logarithm of a tile's size, and its states."""
    t = next(t for t in range(12, 19) if mean << t >= 1 << 24 or t == 18)
    return t, 8 if mean * n < 1 << 24 else 32


@dataclass(frozen=True)
class Parts:
    """Where in a message what is."""

    tables: range
    counts: range
    states: range
    words: range


def parts(message: list[int], numel: int) -> Parts:
    """The parts of a coded message."""
    form, tables = message[2], _end_of_tables(message)
    tiles = -(-numel // (1 << form % 8 + 12))
    states = tables + 4 * tiles
    words = states + 4 * tiles * (8 if form & 8 else 32)
    return Parts(range(12, tables), range(tables, states), range(states, words), range(words, len(message)))


_Code = tuple[int, int, int, int]
"""A symbol, its f and start, and its b."""


def _codes(frequencies: list[int]) -> list[_Code]:
    """What a context's symbols are sent as: the escape where they have no frequency."""
    starts = [0, *accumulate(frequencies)]
    codes = list(zip(range(ESCAPE + 1), frequencies, starts[:-1], [*BITS, 0], strict=True))
    return [code if code[1] else codes[ESCAPE] for code in codes]


# --- Messages --------------------------------------------------------------------------------------------


def _coded(old: list[int], new: list[int], fp16: bool) -> tuple[list[int], bytes]:
    """The header's first 4 bytes, and what follows the header."""
    n = len(old)
    if not n:
        return [], b""
    x, y = np.array(old), np.array(new)
    exponents, d, counted = _exponents(x, fp16), _differences(x, y), _counted(n)
    base = _base(exponents[counted])
    contexts = _contexts(exponents, base)
    symbols = SYMBOL_OF[np.minimum(abs(d), 513)].tolist()
    counts = [[0] * 42 for _ in range(CONTEXTS)]
    for i in np.flatnonzero(counted).tolist():
        counts[contexts[i]][symbols[i]] += 1
    frequencies = [_frequencies(row, n >= 1 << 21) for row in counts]
    t, lanes = _tiles(n, _mean(counts, frequencies))
    codes = [_codes(f) for f in frequencies]
    lengths, states, words = b"", b"", b""
    for low in range(0, n, 1 << t):
        tile = slice(low, low + (1 << t))
        said, last = _encode_tile(d[tile].tolist(), contexts[tile], symbols[tile], codes, lanes)
        lengths += len(said).to_bytes(4, "little")
        states += b"".join(state.to_bytes(4, "little") for state in last)
        words += b"".join(word.to_bytes(2, "little") for word in said)
    header = [51, base, t - 12 + 8 * (lanes == 8) + 16 * fp16, 0]
    return header, _tables(frequencies) + lengths + states + words


def _encode_tile(
    moves: list[int], contexts: list[int], symbols: list[int], codes: list[list[_Code]], lanes: int
) -> tuple[list[int], list[int]]:
    """Its words and the last states."""
    states, backwards = [1 << 15] * lanes, []
    for i in range(len(moves) - 1, -1, -1):
        s, f, start, b = codes[contexts[i]][symbols[i]]
        x, r = states[i % lanes], 0
        if b:
            r = 2 * (abs(moves[i]) - LOWEST[s]) + (moves[i] < 0)
        if x >= f << 21 - b:
            backwards.append(x % 0x10000)
            x >>= 16
        if s == ESCAPE:  # which the decoder reads before
            backwards.append(moves[i] % 0x10000)
        states[i % lanes] = (((x // f << b) + r) << 10) + start + x % f
    return backwards[::-1], states
