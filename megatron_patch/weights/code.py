"""The exact code of weights' changes: new bf16 or fp16 bits minus old ones, at about their entropy.

After an optimizer's step most weights are unchanged, or have moved by a few representable numbers. The move d
is counted in representable numbers, on a line of all bit patterns on which -0 is next to +0:

    line(x) = x ^ 0x7fff where the sign bit of x is set, else x        int16 -> int16, one to one
    d       = line(new) - line(old) mod 2^16                           int16

d is coded by range ANS (rans.py), given the exponent of the old weight, which all ranks have. A message is

    header    a byte each: kind, base, form, 0; then the first sum of the new weights, int64
    tables    frequencies of symbols by context (tables.py), then zeros to a multiple of 4 bytes
    tiles     uint32 [T]: words of each tile; uint32 [T, states]: the states from which the decoder starts
    words     uint16: the words of all tiles, one tile after another

    form = log2 of a tile's weights - 12, + 8 where a tile has 8 states and not 32, + 16 in fp16

If a message would not be shorter than the weights themselves, the weights follow the header (kind RAW; base
and form are 0). By the sum (sums.py) a receiver finds out whether its old weights were the sender's and the
message is intact. If a sender's weights have changed since they were coded, it sets the kind to STALE; the
rest of the message is then meaningless.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_patch.weights import rans, tables
from megatron_patch.weights.sums import sums as sums

CODED, RAW, STALE = 0x33, 0x47, 0xFC
"""Kinds of messages. Any two differ in 4 bits or more: if bit errors made a message STALE on one rank only,
that rank would wait forever for the others to gather in full."""
HEADER_BYTES = 12
NEW_SUM = slice(4, HEADER_BYTES)
"""The header's bytes with the first sum of the new weights."""
FACTS = 3
"""The length of `facts`: how many weights of a shard did not change, and the two sums of the old weights."""
WEIGHTS_DIFFER, MESSAGE_CHANGED, OWNER_CHANGED = 1, 2, 3
"""The errors that `decode` finds; it writes 0 if there is none."""


class Mismatch(Exception):
    """A message does not fit these weights, or is damaged."""

    def __init__(self, verdict: int = MESSAGE_CHANGED) -> None:
        super().__init__(
            {
                WEIGHTS_DIFFER: "the new weights are not the owner's: these are not the weights that it had "
                "before its step, or the message has changed on its way",
                MESSAGE_CHANGED: "the message has changed on its way",
                OWNER_CHANGED: "the owner's weights were changed between its step and their gather",
            }[verdict]
        )
        self.verdict = verdict


def bound(numel: int) -> int:
    """Return the most bytes that a message for `numel` weights may have."""
    return HEADER_BYTES + 2 * numel


def encode(
    old: torch.Tensor, new: torch.Tensor, fp16: bool, message: torch.Tensor, facts: torch.Tensor
) -> int:
    """Write the message that turns `old` into `new`, int16 [n], and return its length in bytes.

    Args:
        fp16: whether weights are fp16, not bf16, which says where the exponent is. The code is exact with
            either value.
        message: uint8 [bound(n)], written.
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
    """Return the first 4 bytes of a coded message, and all that follows its header."""
    n, symbols = len(difference), tables.SYMBOLS
    symbol = tables.SYMBOL_OF[np.minimum(np.abs(difference), tables.FAR + 1)]
    places = (exponents * symbols + symbol)[tables.counted(n)]
    counts = np.bincount(places, minlength=256 * symbols).reshape(256, symbols)
    head, front, frequencies, tiles = _plan(counts, n, fp16)
    contexts = tables.context(exponents, head[1])
    words_of_tiles, states, words = rans.encode(difference, contexts, frequencies, tiles)
    numbers = np.append(words_of_tiles, states).astype("<u4").tobytes()
    return head, front + numbers + words.astype("<u2").tobytes()


def _plan(counts: np.ndarray, numel: int, fp16: bool) -> tuple[bytes, bytes, np.ndarray, rans.Tiles]:
    """Decide how to code, given the counts of symbols at each exponent, int64 [256, SYMBOLS].

    Returns a message's first 4 bytes; its tables, padded with zeros; the frequencies; and the tiles.
    """
    base = tables.window(counts.sum(1))
    by_context = np.zeros((tables.CONTEXTS, tables.SYMBOLS), np.int64)
    np.add.at(by_context, tables.context(np.arange(len(counts)), base), counts)
    frequencies = tables.normalized(by_context, escapes=tables.sampled(numel))
    tiles = rans.Tiles(numel, *tables.tile_and_lanes(numel, by_context, frequencies))
    front = tables.written(frequencies).tobytes()
    form = tiles.log2_size - tables.SMALLEST_TILE
    form |= 8 * (tiles.lanes == tables.FEW_LANES) | 16 * fp16
    return bytes([CODED, base, form, 0]), front + bytes(-len(front) % 4), frequencies, tiles


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, verdicts: torch.Tensor
) -> None:
    """Replace the old weights of all senders' shards by the new ones, in place, except in shard `own`.

    Args:
        messages: uint8 [N, row]; row i has the message for shard i.
        places: int64 [N, 2]: the byte of its row where a message begins, a multiple of 8, and its length.
        shards: int16 [N, n]. A shard for which an error was found is undefined afterwards.
        own: this rank's shard, of whose message only the kind STALE is looked at; -1: none of them.
        verdicts: int32 [N], written: 0, or the error found (WEIGHTS_DIFFER, MESSAGE_CHANGED, OWNER_CHANGED).
    """
    decode_each(_decode_one, messages, places, shards, own, verdicts)


def decode_each(
    decode_one: Callable[[torch.Tensor, torch.Tensor], int],
    messages: torch.Tensor,
    places: torch.Tensor,
    shards: torch.Tensor,
    own: int,
    verdicts: torch.Tensor,
) -> None:
    """Run `decode` with a function that decodes one message, uint8 [bytes], into weights, int16 [n]."""
    for sender, (start, size) in enumerate(places.tolist()):
        message = messages[sender, start : start + size]
        if sender == own:
            verdicts[sender] = OWNER_CHANGED if int(message[0]) == STALE else 0
        else:
            verdicts[sender] = decode_one(message, shards[sender])


def _decode_one(message: torch.Tensor, weights: torch.Tensor) -> int:
    try:
        _decode(message, weights)
    except Mismatch as mismatch:
        return mismatch.verdict
    except rans.Damaged:  # An old weight with another exponent than the sender's has another context.
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
    """Return the kind of a message for `numel` weights, CODED or RAW.

    Raises:
        Mismatch: the message has another kind, or a length that its kind cannot have.
    """
    kind = int(message[0]) if message.numel() >= HEADER_BYTES else None
    if kind == STALE:
        raise Mismatch(OWNER_CHANGED)
    if kind != CODED and (kind != RAW or message.numel() != bound(numel)):
        raise Mismatch
    return kind


def line(bits: torch.Tensor) -> torch.Tensor:
    """Return the places of bit patterns on the line, int16 -> int16; the function is its own inverse."""
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def _sum(weights: torch.Tensor) -> bytes:
    return sums(weights).cpu().numpy()[:1].tobytes()


def _exponents(weights: torch.Tensor, fp16: bool) -> np.ndarray:
    return (weights.cpu().numpy().astype(np.int64) & 0x7FFF) >> (10 if fp16 else 7)


def _difference(message: np.ndarray, weights: torch.Tensor) -> np.ndarray:
    """Decode d of every weight, int64 [n], from a message of kind CODED."""
    base, form = message[1:3].tolist()
    log2_size, lanes = tables.SMALLEST_TILE + form % 8, tables.LANES
    front = tables.read(message[HEADER_BYTES:])
    if form >= 32 or log2_size > tables.LARGEST_TILE or front is None:
        raise Mismatch
    if form & 8:
        lanes = tables.FEW_LANES
    frequencies, size = front
    tiles = rans.Tiles(weights.numel(), log2_size, lanes)
    start = HEADER_BYTES + size + -size % 4
    stop = start + 4 * tiles.number * (1 + lanes)
    if len(message) < stop:
        raise Mismatch
    numbers = message[start:stop].copy().view("<u4").astype(np.int64)
    counts, states = numbers[: tiles.number], numbers[tiles.number :].reshape(-1, lanes)
    if len(message) != stop + 2 * int(counts.sum()):
        raise Mismatch
    contexts = tables.context(_exponents(weights, form >= 16), base)
    return rans.decode(contexts, frequencies, tiles, counts, states, message[stop:].copy().view("<u2"))
