"""Range ANS with interleaved states, which codes the symbols of a tile's moves in words of 16 bits.

(Duda, "Asymmetric numeral systems", 2013; Giesen, "Interleaved entropy coders", 2014.) Weight i of a tile
belongs to state i mod lanes, so that a row of `lanes` weights is coded together. A state gives back first
what it took last: the encoder starts at a tile's last weight, and ends with the states from which the decoder
starts. Words are in the order in which the decoder reads them. docs/weight_code.md has the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_patch.weights.tables import CONTEXTS, ESCAPE, FAR, LOWEST, PRECISION, RAW_BITS, SYMBOL_OF, TOTAL

FIRST_STATE = 1 << 15


class Damaged(Exception):
    """The words do not come from the encoder, or are decoded with other contexts."""


@dataclass(frozen=True)
class Tiles:
    """How n weights are cut: into T tiles of 2^log2_size weights, of which the last one may be shorter."""

    numel: int
    log2_size: int
    lanes: int

    @property
    def number(self) -> int:
        """T, the number of tiles."""
        return -(-self.numel >> self.log2_size)

    def rows(self, weights: np.ndarray) -> np.ndarray:
        """Arrange [n] as [rows, T, lanes], with zeros after the last weight."""
        size = 1 << self.log2_size
        filled = np.zeros((self.number, size), weights.dtype)
        filled.reshape(-1)[: self.numel] = weights
        shape = self.number, size // self.lanes, self.lanes
        return np.ascontiguousarray(filled.reshape(shape).transpose(1, 0, 2))

    def flat(self, rows: np.ndarray) -> np.ndarray:
        """The inverse of `rows`."""
        return rows.transpose(1, 0, 2).reshape(-1)[: self.numel]


def encode(
    difference: np.ndarray, contexts: np.ndarray, frequencies: np.ndarray, tiles: Tiles
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Code the moves d, int64 [n], in their contexts, int64 [n].

    Returns each tile's number of words, int64 [T], its last states, int64 [T, lanes], and all words, uint16.
    """
    size = np.abs(difference)
    symbol = SYMBOL_OF[np.minimum(size, FAR + 1)]
    symbol = np.where(frequencies[contexts, symbol] > 0, symbol, ESCAPE)
    starts = frequencies.cumsum(1) - frequencies
    raw = (size - LOWEST[symbol] << 1 | (difference < 0)) & (1 << RAW_BITS[symbol]) - 1
    values = frequencies[contexts, symbol], starts[contexts, symbol], RAW_BITS[symbol], raw
    f, start, bits, raw = map(tiles.rows, values)
    there = tiles.rows(np.ones(tiles.numel, bool))
    says = np.zeros((*there.shape, 2), bool)
    words = np.zeros(says.shape, np.uint16)
    says[..., 0], words[..., 0] = tiles.rows(symbol == ESCAPE), tiles.rows(difference & 0xFFFF)
    x = np.full(there.shape[1:], FIRST_STATE, np.int64)
    for row in range(len(there) - 1, -1, -1):
        full = there[row] & (x >= f[row] << 21 - bits[row])
        says[row, ..., 1], words[row, ..., 1] = full, x & 0xFFFF
        x = np.where(full, x >> 16, x)
        quotient, remainder = np.divmod(x, np.maximum(f[row], 1))
        taken = ((quotient << bits[row] | raw[row]) << PRECISION) + start[row] + remainder
        x = np.where(there[row], taken, x)
    says, words = says.transpose(1, 0, 2, 3), words.transpose(1, 0, 2, 3)
    return says.sum((1, 2, 3)), x, words[says]


def decode(
    contexts: np.ndarray,
    frequencies: np.ndarray,
    tiles: Tiles,
    counts: np.ndarray,
    states: np.ndarray,
    words: np.ndarray,
) -> np.ndarray:
    """Decode the moves d, int64 [n], from what `encode` returned.

    Raises:
        Damaged: a tile used more or fewer words than it has, or did not end with the states FIRST_STATE.
    """
    starts = frequencies.cumsum(1) - frequencies
    slots = np.repeat(np.tile(np.arange(frequencies.shape[1]), CONTEXTS), frequencies.reshape(-1))
    symbol_of = slots.reshape(CONTEXTS, TOTAL)
    there = tiles.rows(np.ones(tiles.numel, bool))
    difference = np.zeros(there.shape, np.int64)
    x, ends = states.astype(np.int64), counts.cumsum()
    at = ends - counts
    readable = np.append(words, np.zeros(1, np.uint16)).astype(np.int64)
    for row, context in enumerate(tiles.rows(contexts)):
        symbol = symbol_of[context, x & TOTAL - 1]
        bits = RAW_BITS[symbol]
        raw = x >> PRECISION & (1 << bits) - 1
        smaller = frequencies[context, symbol] * (x >> PRECISION + bits) + (x & TOTAL - 1)
        x = np.where(there[row], smaller - starts[context, symbol], x)
        needs = np.stack([there[row] & (symbol == ESCAPE), there[row] & (x < FIRST_STATE)], 2)
        places = (at[:, None] + needs.reshape(len(at), -1).cumsum(1)).reshape(needs.shape) - needs
        read = readable[np.minimum(places, len(words))]
        at = at + needs.sum((1, 2))
        x = np.where(needs[..., 1], x << 16 | read[..., 1], x)
        size = LOWEST[symbol] + (raw >> 1)
        move = np.where(needs[..., 0], read[..., 0], np.where(raw & 1, -size, size))
        difference[row] = np.where(there[row], move, 0)
    if (at != ends).any() or (x != FIRST_STATE).any():
        raise Damaged
    return tiles.flat(difference)
