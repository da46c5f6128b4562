"""The exact code of a weight's change: new bf16 or fp16 bits minus old ones, without any loss.

After an optimizer's step most weights are the same number as before, or a few representable numbers further.
The difference is counted in representable numbers, on a line that all bit patterns lie on, -0 beside +0:

    line(x) = x ^ 0x7fff where the sign bit of x is set, else x        int16 -> int16, one to one
    d       = line(new) - line(old) mod 2^16                           int16

and coded in planes: 2 bits for each weight, then 4, 8, 16 bits for those that the plane before could not say.

    2 bits   0: d = 0      1: d = +1      2: d = -1      3: see the next plane
    4 bits   z = 2*(|d| - 2) + (d < 0), for z < 15                     15: see the next plane
    8 bits   z - 15, for z < 270                                      255: see the next plane
    16 bits  d

A tile is 2,048 weights. Where fewer than half of a tile's weights changed, a bitmap says which, and the 2
bits are sent of those alone. A message is

    header    int64 [7]: kind, n, how many did not change, two sums of the old weights, two of the new ones
    tiles     uint16 [T, 4]: codes in the 2-bit plane (NO_BITMAP: all of them), the 4-, 8- and 16-bit planes
    planes    bitmaps, 2 bits, 4 bits, 8 bits, 16 bits

where a tile's part of a plane is whole bytes, zeros behind the last code, the first code in the lowest
bits: a tile's place in a plane is a sum over the tiles before it. A message that would be longer than the
weights themselves holds those (kind RAW). By the sums of the new weights a receiver finds out that its old
weights were not the sender's, or that the message has changed on its way. A sender whose weights have changed
since says so (kind STALE): such a message says nothing of them.
The sums are weight_sums.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_patch.weights.sums import TILE as TILE
from megatron_patch.weights.sums import sums as sums
from megatron_patch.weights.sums import tiles_of as tiles_of

CODED, RAW, STALE = 1, 2, 0xFC
"""Kinds. No flipped bit makes the others STALE: one rank alone would gather in full, and wait."""
NO_BITMAP = 0xFFFF
HEADER_BYTES = 56
KIND, UNCHANGED = 0, 2
OLD_SUMS, NEW_SUMS = slice(3, 5), slice(5, 7)
"""Places in the header."""
WEIGHTS_DIFFER, MESSAGE_CHANGED, OWNER_CHANGED = 1, 2, 3
"""What `decode` finds; 0 where all is well."""
_TILE_BYTES = 8


class Mismatch(Exception):
    """A message that is not of these weights, or not whole."""

    def __init__(self, found: int = MESSAGE_CHANGED) -> None:
        super().__init__(
            {
                WEIGHTS_DIFFER: "the new weights are not the owner's: these are not the weights that it had "
                "before its step, or the message has changed on its way",
                MESSAGE_CHANGED: "the message has changed on its way",
                OWNER_CHANGED: "the owner's weights were changed between its step and their gather",
            }[found]
        )
        self.found = found


def check(found: int) -> None:
    """Raise Mismatch for what `decode` found, unless that is nothing."""
    if found:
        raise Mismatch(found)


def bound(numel: int) -> int:
    """The most bytes that a message of `numel` weights has."""
    return HEADER_BYTES + 2 * numel


def encode(old: torch.Tensor, new: torch.Tensor, message: torch.Tensor) -> int:
    """Write what makes `new` of `old`, int16 [n], into `message`, uint8 [bound(n)]; returns its bytes."""
    with old.device:
        return _encode(old, new, message)


def _encode(old: torch.Tensor, new: torch.Tensor, message: torch.Tensor) -> int:
    n = old.numel()
    difference = _padded(line(new) - line(old))
    first = _first_codes(difference)
    changed = (first > 0).sum(1)
    bitmap = 2 * changed < _lengths(n)
    escaped = first == 3
    z = _zigzag(difference)
    fours, eights = torch.where(escaped, z.clamp(max=15), -1), torch.where(escaped & (z >= 15), z - 15, -1)
    sixteens = eights >= 255
    counts = torch.stack([changed, escaped.sum(1), (eights >= 0).sum(1), sixteens.sum(1)], 1)
    there = torch.arange(TILE)[None, :] < _lengths(n)[:, None]
    parts = [
        _plane((first > 0).int(), bitmap[:, None] & there, 1),
        _plane(first, torch.where(bitmap[:, None], first > 0, there), 2),
        _plane(fours, fours >= 0, 4),
        _plane(eights.clamp(max=255), eights >= 0, 8),
        difference[sixteens].to(torch.int16).view(torch.uint8),
    ]
    counts[:, 0] = torch.where(bitmap, changed, NO_BITMAP)
    tiles = _as_uint16(counts)
    size = HEADER_BYTES + tiles.numel() + sum(part.numel() for part in parts)
    kind = CODED if size < bound(n) else RAW
    if kind == RAW:
        parts, tiles, size = [new.contiguous().view(torch.uint8)], tiles[:0], bound(n)
    header = torch.tensor(
        [kind, n, n - int(changed.sum()), *sums(old).tolist(), *sums(new).tolist()], dtype=torch.int64
    )
    torch.cat([header.view(torch.uint8), tiles, *parts], out=message[:size])
    return size


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, found: torch.Tensor
) -> None:
    """Make the senders' new weights of their old ones, int16 [N, n], in place: `shards` but for the `own`-th.

    Writes into `found`, int32 [N], what it finds of each: 0, or that the weights are not the sender's old
    ones, or that the message is truncated or changed; what that shard holds then is not defined. Of the own
    message only whether it is STALE is looked at. `own` may be none of them, as -1.

    Args:
        messages: uint8 [N, row]; the i-th message is in the i-th row.
        places: int64 [N, 2]: where in its row a message begins, at a multiple of 8, and its bytes.
    """
    decode_each(_decode_one, messages, places, shards, own, found)


def decode_each(
    decode_one: Callable[[torch.Tensor, torch.Tensor], int],
    messages: torch.Tensor,
    places: torch.Tensor,
    shards: torch.Tensor,
    own: int,
    found: torch.Tensor,
) -> None:
    """`decode` by a function that decodes one message, uint8 [bytes], into weights, int16 [n]."""
    for sender, (start, size) in enumerate(places.tolist()):
        message = messages[sender, start : start + size]
        if sender == own:
            found[sender] = OWNER_CHANGED if int(message[0]) == STALE else 0
        else:
            found[sender] = decode_one(message, shards[sender])


def _decode_one(message: torch.Tensor, weights: torch.Tensor) -> int:
    try:
        with weights.device:
            _decode(message, weights)
    except Mismatch as mismatch:
        return mismatch.found
    return 0


def _decode(message: torch.Tensor, weights: torch.Tensor) -> None:
    n = weights.numel()
    header = read_header(message, n)
    body = message[HEADER_BYTES:]
    if header[KIND] == RAW:
        weights.copy_(body.clone().view(torch.int16))
    else:
        weights.copy_(line(line(weights) + _difference(body, n)[:n]))
    if sums(weights).tolist() != header[NEW_SUMS]:
        raise Mismatch(WEIGHTS_DIFFER if header[KIND] == CODED else MESSAGE_CHANGED)


def read_header(message: torch.Tensor, numel: int) -> list[int]:
    """The header of a message of `numel` weights.

    Raises:
        Mismatch: it is not of `numel` weights, or not of the length that it should have.
    """
    if message.numel() < HEADER_BYTES:
        raise Mismatch
    header: list[int] = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    if header[KIND] == STALE:
        raise Mismatch(OWNER_CHANGED)
    if header[KIND] not in (CODED, RAW) or header[1] != numel:
        raise Mismatch
    if header[KIND] == RAW and message.numel() != bound(numel):
        raise Mismatch
    return header


def line(bits: torch.Tensor) -> torch.Tensor:
    """The place of bit patterns on the line, int16 -> int16; its own inverse."""
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """int16 [n] -> int32 [T, TILE], zeros behind."""
    wide = values.to(torch.int32)
    return torch.nn.functional.pad(wide, (0, -wide.numel() % TILE)).view(tiles_of(wide.numel()), TILE)


def _lengths(numel: int) -> torch.Tensor:
    """Weights of each tile, int64 [T]."""
    return (numel - TILE * torch.arange(tiles_of(numel))).clamp(max=TILE)


def _first_codes(difference: torch.Tensor) -> torch.Tensor:
    codes = torch.full_like(difference, 3)
    for code, value in ((0, 0), (1, 1), (2, -1)):
        codes[difference == value] = code
    return codes


def _zigzag(difference: torch.Tensor) -> torch.Tensor:
    return 2 * (difference.abs() - 2) + (difference < 0).int()


def _unzigzag(z: torch.Tensor) -> torch.Tensor:
    size = z // 2 + 2
    return torch.where(z % 2 == 1, -size, size)


def _plane(codes: torch.Tensor, chosen: torch.Tensor, bits: int) -> torch.Tensor:
    """The chosen codes, int32 [T, TILE], packed tile by tile: uint8 [bytes]."""
    per_byte = 8 // bits
    counts = chosen.sum(1)
    sizes = -(-counts // per_byte)
    rank = chosen.cumsum(1) - 1
    starts = sizes.cumsum(0) - sizes
    byte = starts[:, None] + rank // per_byte
    shifted = codes << (bits * (rank % per_byte)).int()
    packed = torch.zeros(int(sizes.sum()), dtype=torch.int32)
    packed.index_add_(0, byte[chosen], shifted[chosen].int())
    return packed.to(torch.uint8)


def _as_uint16(values: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 65535, any shape, as bytes: uint8 [2 * numel], the lower byte first."""
    flat = values.reshape(-1).to(torch.int32)
    return torch.stack([flat & 0xFF, flat >> 8], 1).to(torch.uint8).reshape(-1)


class _Reader:
    """Takes the planes off a message, one after another."""

    def __init__(self, body: torch.Tensor) -> None:
        self._rest = body

    def take(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._rest.numel():
            raise Mismatch
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken

    def plane(self, counts: torch.Tensor, bits: int) -> torch.Tensor:
        """The codes of a plane, int32 [sum of counts]; `counts` is int64 [T]."""
        per_byte = 8 // bits
        sizes = -(-counts // per_byte)
        packed = self.take(int(sizes.sum())).to(torch.int32)
        shifts = torch.arange(per_byte, dtype=torch.int32) * bits
        codes = ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[rows]
        return codes[(sizes.cumsum(0) - sizes)[rows] * per_byte + place]

    def end(self) -> None:
        if self._rest.numel():
            raise Mismatch


def _difference(body: torch.Tensor, numel: int) -> torch.Tensor:
    """d of every weight, int16 [T * TILE], from what follows the header."""
    reader, lengths, tiles = _Reader(body), _lengths(numel), tiles_of(numel)
    raw = reader.take(_TILE_BYTES * tiles).to(torch.int64).view(tiles, 4, 2)
    counts = raw[..., 0] | raw[..., 1] << 8
    bitmap = counts[:, 0] != NO_BITMAP
    changed = torch.where(bitmap, counts[:, 0], lengths)
    for few, many in ((changed, lengths), (counts[:, 1], changed), (counts[:, 2], counts[:, 1])):
        _check(few <= many)
    _check(counts[:, 3] <= counts[:, 2])
    there = torch.arange(TILE)[None, :] < lengths[:, None]
    mapped = torch.zeros(tiles, TILE, dtype=torch.bool)
    mapped[bitmap[:, None] & there] = reader.plane(torch.where(bitmap, lengths, 0), 1) > 0
    said = torch.where(bitmap[:, None], mapped, there)
    _check(said.sum(1) == changed)
    first = torch.zeros(tiles, TILE, dtype=torch.int32)
    first[said] = reader.plane(changed, 2)
    _check((first == 3).sum(1) == counts[:, 1])
    z = reader.plane(counts[:, 1], 4)
    _check((z == 15).sum() == counts[:, 2].sum())
    eights = reader.plane(counts[:, 2], 8)
    _check((eights == 255).sum() == counts[:, 3].sum())
    sixteens = reader.take(2 * int(counts[:, 3].sum()))
    reader.end()
    far = _unzigzag(eights + 15)
    far[eights == 255] = sixteens.clone().view(torch.int16).to(far.dtype)
    near = _unzigzag(z)
    near[z == 15] = far
    difference = torch.tensor([0, 1, -1, 0], dtype=torch.int32)[first.long()]
    difference[first == 3] = near.to(torch.int32)
    return difference.reshape(-1).to(torch.int16)


def _check(consistent: torch.Tensor) -> None:
    if not bool(consistent.all()):
        raise Mismatch
