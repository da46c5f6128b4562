"""A second coder of the weight code, written from docs/weight_code.md without the package's code.

Weights are lists of 16-bit patterns, 0 to 65535, and messages are lists of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Wrong(Exception):
    """A message that is not right."""


def encode(old: list[int], new: list[int], fp16: bool, tiles: tuple[int, int] | None = None) -> list[int]:
    """`tiles`: the logarithm of a tile's size and its states, where a sender would choose others."""
    header, body = _coded(old, new, fp16, tiles)
    if not tiles and 12 + len(body) >= 12 + 2 * len(new):
        header, body = [71, 0, 0, 0], b"".join(x.to_bytes(2, "little") for x in new)
    return [*header, *first_sum(new).to_bytes(8, "little"), *body]


def decode(message: list[int], old: list[int]) -> list[int] | None:
    """The new weights; None: the message is not right."""
    try:
        new = _decoded(message, old)
    except Wrong:
        return None
    return new if _number(message, 4, 8) == first_sum(new) else None


def entropy(old: list[int] | np.ndarray, new: list[int] | np.ndarray, fp16: bool) -> float:
    """Bits of all d together, by how often each one is among the old weights of an exponent."""
    x, y = (np.asarray(one).astype(np.int64) & 0xFFFF for one in (old, new))
    exponents = _exponents(x, fp16)
    pairs = np.unique(exponents * 0x10000 + (_differences(x, y) & 0xFFFF), return_counts=True)[1]
    weights = np.unique(exponents, return_counts=True)[1]
    return float((weights * np.log2(weights)).sum() - (pairs * np.log2(pairs)).sum())


# --- Moves -----------------------------------------------------------------------------------------------


def line(x: int) -> int:
    """A pattern's place, which is one of 0 to 65535 as well; they stand for themselves modulo 2^16."""
    return x ^ 0x7FFF if x & 0x8000 else x


def _lines(x: np.ndarray) -> np.ndarray:
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


def _read_tables(message: list[int]) -> tuple[list[list[int]], int]:
    """Frequencies, and where the zeros behind the tables end."""
    nibbles = [_number(message, 12 + k // 2, 1) >> 4 * (k % 2) & 15 for k in range(CONTEXTS)]
    at, forms = 20, []
    for nibble in nibbles:
        byte = nibble
        if nibble == 15:
            byte, at = _number(message, at, 1), at + 1
        if byte % 128 >= ESCAPE:
            raise Wrong
        forms.append((byte % 128, byte // 128))
    total = sum(s + escape for s, escape in forms)
    end = at + total + -(-total // 4)
    _number(message, at, end - at)
    numbers = iter(
        message[at + k] + 256 * (message[at + total + k // 4] >> 2 * (k % 4) & 3) for k in range(total)
    )
    return [_of_context(numbers, *form) for form in forms], end + -end % 4


def _of_context(numbers: Iterator[int], s: int, escape: int) -> list[int]:
    rare = next(numbers) if escape else 0
    others = [next(numbers) for _ in range(s)] + [0] * (ESCAPE - 1 - s) + [rare]
    if sum(others) >= TOTAL:
        raise Wrong
    return [TOTAL - sum(others), *others]


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
    """The parts of a coded message; Wrong: it is shorter than that."""
    form, tables = _number(message, 2, 1), _read_tables(message)[1]
    tiles = -(-numel // (1 << form % 8 + 12))
    states = tables + 4 * tiles
    words = states + 4 * tiles * (8 if form & 8 else 32)
    if len(message) < words:
        raise Wrong
    return Parts(range(12, tables), range(tables, states), range(states, words), range(words, len(message)))


def _number(message: list[int], at: int, size: int) -> int:
    if at + size > len(message):
        raise Wrong
    return int.from_bytes(bytes(message[at : at + size]), "little")


_Code = tuple[int, int, int, int]
"""A symbol, its f and start, and its b."""


def _codes(frequencies: list[int]) -> list[_Code]:
    """What a context's symbols are sent as: the escape where they have no frequency."""
    starts = [0, *accumulate(frequencies)]
    codes = list(zip(range(ESCAPE + 1), frequencies, starts[:-1], [*BITS, 0], strict=True))
    return [code if code[1] else codes[ESCAPE] for code in codes]


# --- Messages --------------------------------------------------------------------------------------------


def _coded(
    old: list[int], new: list[int], fp16: bool, tiles: tuple[int, int] | None
) -> tuple[list[int], bytes]:
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
    t, lanes = tiles or _tiles(n, _mean(counts, frequencies))
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


def _decoded(message: list[int], old: list[int]) -> list[int]:
    """The weights, whatever the sum says."""
    n, kind = len(old), _number(message, 0, 12) % 256
    if kind == 71 and len(message) == 12 + 2 * n:
        return [_number(message, 12 + 2 * i, 2) for i in range(n)]
    form = message[2]
    if kind != 51 or form >= 32 or form % 8 > 6:
        raise Wrong
    frequencies, where = _read_tables(message)[0], parts(message, n)
    x = np.array(old, np.int64)
    contexts = _contexts(_exponents(x, form >= 16), message[1])
    lanes, size = 8 if form & 8 else 32, 1 << form % 8 + 12
    slots = [[code for s, code in enumerate(_codes(f)) for _ in range(f[s])] for f in frequencies]
    at, moves = where.words.start, []
    for tile, low in enumerate(range(0, n, size)):
        end = at + 2 * _number(message, where.counts[4 * tile], 4)
        if end > len(message):
            raise Wrong
        words = [message[k] + 256 * message[k + 1] for k in range(at, end, 2)]
        states = [_number(message, where.states[4 * (tile * lanes + lane)], 4) for lane in range(lanes)]
        moves += _decode_tile(contexts[low : low + size], words, states, slots)
        at = end
    if at != len(message):
        raise Wrong
    places = (_lines(x) + np.array(moves, np.int64)) % 0x10000
    return _lines(places).tolist()


def _decode_tile(
    contexts: list[int], words: list[int], states: list[int], slots: list[list[_Code]]
) -> list[int]:
    moves, words, lanes = [], words[::-1], len(states)
    for i, context in enumerate(contexts):
        x, d = states[i % lanes], 0
        slot = x % 1024
        s, f, start, b = slots[context][slot]
        r = (x >> 10) % (1 << b)
        x = f * (x >> 10 + b) + slot - start
        if len(words) < (s == ESCAPE) + (x < 1 << 15):
            raise Wrong
        if s == ESCAPE:
            d = words.pop()
        elif s:
            d = (LOWEST[s] + r // 2) * (-1 if r % 2 else 1)
        if x < 1 << 15:
            x = (x << 16) + words.pop()
        states[i % lanes] = x
        moves.append(d)
    if words or any(x != 1 << 15 for x in states):
        raise Wrong
    return moves
