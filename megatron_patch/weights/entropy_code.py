"""The entropy code of a weight's change, beside that of weights/code.py: fewer bits, slower.

The same difference d of bf16 or fp16 weights is coded at about its entropy, given the exponent of the old
weight, which all ranks have. A message is

    header    a byte each: kind, base, form, 0; then the first sum of the new weights, int64
    tables    frequencies of symbols by context (entropy_tables.py), then zeros to a multiple of 4 bytes
    tiles     uint32 [T]: words of each tile; uint32 [T, states]: its states at the decoder's beginning
    words     uint16: of the tiles, one after another (rans.py)

    form = log2 of a tile's weights - 12, + 8 where a tile has 8 states and not 32, + 16 in fp16

A message that would not be shorter than the weights themselves holds those behind the header (kind RAW; base
and form are 0). A sender whose weights have changed since writes the kind STALE, as in the other code.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_patch.weights import entropy_tables, rans
from megatron_patch.weights.code import (
    MESSAGE_CHANGED,
    OWNER_CHANGED,
    STALE,
    WEIGHTS_DIFFER,
    Mismatch,
    decode_each,
    line,
)
from megatron_patch.weights.sums import sums as sums

CODED, RAW = 0x33, 0x47
"""Kinds: any two, STALE among them, differ in 4 bits, and from the other code's in 3."""
HEADER_BYTES = 12
NEW_SUM = slice(4, HEADER_BYTES)
"""Bytes of the header."""
FACTS = 3
"""What `encode` tells of a shard: how many weights did not change, and the two sums of the old ones."""


def bound(numel: int) -> int:
    """The most bytes that a message of `numel` weights has."""
    return HEADER_BYTES + 2 * numel


def encode(
    old: torch.Tensor, new: torch.Tensor, fp16: bool, message: torch.Tensor, facts: torch.Tensor
) -> int:
    """Write what makes `new` of `old`, int16 [n], into `message`, uint8 [bound(n)]; returns its bytes.

    Args:
        fp16: whether they are fp16, not bf16: where the exponent is. All bit patterns come back with either.
        facts: int64 [FACTS], written.
    """
    n = old.numel()
    difference = (line(new) - line(old)).cpu().numpy().astype(np.int64)
    head, body = _coded(_exponents(old, fp16), difference, fp16) if n else (b"", b"")
    if HEADER_BYTES + len(body) >= bound(n):
        head, body = bytes([RAW, 0, 0, 0]), new.cpu().numpy().tobytes()
    written = np.frombuffer(head + _sum(new) + body, np.uint8)
    message[: len(written)].copy_(torch.from_numpy(written.copy()))
    facts[0] = n - int(np.count_nonzero(difference))
    facts[1:].copy_(sums(old))
    return len(written)


def _coded(exponents: np.ndarray, difference: np.ndarray, fp16: bool) -> tuple[bytes, bytes]:
    """The first 4 bytes of a message, and what is behind its header."""
    n, symbols = len(difference), entropy_tables.SYMBOLS
    symbol = entropy_tables.SYMBOL_OF[np.minimum(np.abs(difference), entropy_tables.FAR + 1)]
    places = (exponents * symbols + symbol)[entropy_tables.counted(n)]
    counts = np.bincount(places, minlength=256 * symbols).reshape(256, symbols)
    head, tables, frequencies, tiles = plan(counts, n, fp16)
    contexts = entropy_tables.context(exponents, head[1])
    words_of_tiles, states, words = rans.encode(difference, contexts, frequencies, tiles)
    numbers = np.append(words_of_tiles, states).astype("<u4").tobytes()
    return head, tables + numbers + words.astype("<u2").tobytes()


def plan(counts: np.ndarray, numel: int, fp16: bool) -> tuple[bytes, bytes, np.ndarray, rans.Tiles]:
    """Decide how to code, from how often each symbol occurs with each exponent, int64 [256, SYMBOLS].

    Returns a message's first 4 bytes; its tables, zeros behind them; the frequencies; and the tiles.
    """
    base = entropy_tables.window(counts.sum(1))
    by_context = np.zeros((entropy_tables.CONTEXTS, entropy_tables.SYMBOLS), np.int64)
    np.add.at(by_context, entropy_tables.context(np.arange(len(counts)), base), counts)
    frequencies = entropy_tables.normalized(by_context, escapes=entropy_tables.sampled(numel))
    tiles = rans.Tiles(numel, *entropy_tables.tile_and_lanes(numel, by_context, frequencies))
    tables = entropy_tables.written(frequencies).tobytes()
    form = tiles.log2_size - entropy_tables.SMALLEST_TILE
    form |= 8 * (tiles.lanes == entropy_tables.FEW_LANES) | 16 * fp16
    return bytes([CODED, base, form, 0]), tables + bytes(-len(tables) % 4), frequencies, tiles


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, found: torch.Tensor
) -> None:
    """Make the senders' new weights of their old ones, as weight_code.decode."""
    decode_each(_decode_one, messages, places, shards, own, found)


def _decode_one(message: torch.Tensor, weights: torch.Tensor) -> int:
    try:
        _decode(message, weights)
    except Mismatch as mismatch:
        return mismatch.found
    except rans.Damaged:  # a weight of another exponent than the sender's has another context
        return WEIGHTS_DIFFER
    return 0


def _decode(message: torch.Tensor, weights: torch.Tensor) -> None:
    kind, received = kind_of(message, weights.numel()), message.cpu().numpy()
    if kind == RAW:
        weights.copy_(torch.from_numpy(received[HEADER_BYTES:].copy().view(np.int16)))
    else:
        difference = torch.from_numpy(_difference(received, weights).astype(np.int16))
        weights.copy_(line(line(weights) + difference.to(weights.device)))
    if _sum(weights) != received[NEW_SUM].tobytes():
        raise Mismatch(WEIGHTS_DIFFER if kind == CODED else MESSAGE_CHANGED)


def kind_of(message: torch.Tensor, numel: int) -> int:
    """The kind of a message of `numel` weights, CODED or RAW.

    Raises:
        Mismatch: it is of another kind or length.
    """
    kind = int(message[0]) if message.numel() >= HEADER_BYTES else None
    if kind == STALE:
        raise Mismatch(OWNER_CHANGED)
    if kind != CODED and (kind != RAW or message.numel() != bound(numel)):
        raise Mismatch
    return kind


def _sum(weights: torch.Tensor) -> bytes:
    return sums(weights).cpu().numpy()[:1].tobytes()


def _exponents(weights: torch.Tensor, fp16: bool) -> np.ndarray:
    return (weights.cpu().numpy().astype(np.int64) & 0x7FFF) >> (10 if fp16 else 7)


def _difference(message: np.ndarray, weights: torch.Tensor) -> np.ndarray:
    """d of every weight, int64 [n], from a coded message."""
    base, form = message[1:3].tolist()
    log2_size, lanes = entropy_tables.SMALLEST_TILE + form % 8, entropy_tables.LANES
    tables = entropy_tables.read(message[HEADER_BYTES:])
    if form >= 32 or log2_size > entropy_tables.LARGEST_TILE or tables is None:
        raise Mismatch
    if form & 8:
        lanes = entropy_tables.FEW_LANES
    frequencies, size = tables
    tiles = rans.Tiles(weights.numel(), log2_size, lanes)
    start = HEADER_BYTES + size + -size % 4
    stop = start + 4 * tiles.number * (1 + lanes)
    if len(message) < stop:
        raise Mismatch
    numbers = message[start:stop].copy().view("<u4").astype(np.int64)
    counts, states = numbers[: tiles.number], numbers[tiles.number :].reshape(-1, lanes)
    if len(message) != stop + 2 * int(counts.sum()):
        raise Mismatch
    contexts = entropy_tables.context(_exponents(weights, form >= 16), base)
    return rans.decode(contexts, frequencies, tiles, counts, states, message[stop:].copy().view("<u2"))
