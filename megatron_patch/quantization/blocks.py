"""Which elements share a scale, where blocks follow the parameters that a tensor is made of.

Blocks of b elements are counted from the beginning of every row of every parameter, and cut where a shard
ends. So no block holds elements of two rows, and a row whose gradient is zero is sent as zeros, whatever its
neighbours are. What belongs to no parameter, such as Megatron's padding, is in no block: it is not sent, and
arrives as zero.

    parameter of 3 rows of 200, b = 128   |128|72||128|72||128|72|
    with a shard's end in it              |128|72||30 ¦ 98|72||128|72|

A table lists the blocks of every shard. On the wire a block's codes begin at a whole word, so that no two
blocks share a byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_patch.errors import UserError
from megatron_patch.quantization.packing import planes

SHORTEST_ROW = 16
"""Elements. Shorter rows, of which several share a block, count as one: a scale for each would be 1 bit an
element and more."""

_MOST = 2**31 - 1
"""Elements of a shard whose blocks a table lists."""

Range = tuple[int, int]
"""Elements from the first to before the second."""


@dataclass(frozen=True)
class Span:
    """One parameter's place in a tensor: `length` elements from `start` on, in rows of `row` elements.

    In a part of a tensor a parameter may begin before it (`start` < 0) or end behind it.
    """

    start: int
    length: int
    row: int
    exact: bool = False
    """It is in no block: it is sent as it is (exact.py)."""

    @staticmethod
    def of(start: int, shape: Sequence[int], exact: bool = False) -> Span:
        """A parameter of `shape`; its rows are what the first axis counts, one row for a vector."""
        length = row = 1
        for axis, size in enumerate(shape):
            length *= size
            row *= size if axis or len(shape) == 1 else 1
        return Span(start, length, row if row >= SHORTEST_ROW else max(length, 1), exact)

    def blocks(self, block: int) -> torch.Tensor:
        """(first element, end) of every block, int64 [n, 2]."""
        rows = torch.arange(0, self.length, self.row)[:, None]
        starts = rows + torch.arange(0, self.row, block)
        ends = torch.minimum(starts + block, (rows + self.row).clamp(max=self.length))
        found = torch.stack([starts, ends], dim=-1).view(-1, 2) + self.start
        return found[found[:, 0] < found[:, 1]]


@dataclass(frozen=True)
class Contents:
    """What is exchanged: `numel` elements, and where the parameters lie in them.

    Without `spans` (None) nothing is known of parameters: blocks are counted from each shard's beginning.
    """

    numel: int
    spans: tuple[Span, ...] | None = None

    def part(self, start: int, numel: int) -> Contents:
        """`numel` elements from `start` on; blocks lie where they do in the whole."""
        if self.spans is None:
            return Contents(numel)
        inside = [
            span for span in self.spans if span.start < start + numel and start < span.start + span.length
        ]
        return Contents(numel, tuple(replace(span, start=span.start - start) for span in inside))


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of N shards, in their order."""

    places: torch.Tensor
    """int32 [N, blocks, 3], on CPU: where in its shard a block begins, its number of elements, and where in
    the shard's codes its own begin, in words. A shard with less blocks than others ends with empty ones."""
    words: int
    """Of codes in one payload: as many as the shard with most of them needs."""
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)
    _source: tuple[BlockTable, slice] | None = field(default=None, repr=False)

    @staticmethod
    def of(
        spans: Sequence[Span], shards: Sequence[Sequence[Range]], block: int, bits: int, blocks: int = 1
    ) -> BlockTable:
        """The table of shards, each of the tensor's elements in some ranges, one after the other.

        `blocks` is the least number of blocks that every shard is given.
        """
        coded = [span.blocks(block) for span in spans if not span.exact]
        every = torch.cat([torch.empty(0, 2, dtype=torch.int64), *coded])
        every = every[every[:, 0].argsort()]
        starts, ends = every[:, 0].contiguous(), every[:, 1].contiguous()
        cut = [_cut(starts, ends, ranges) for ranges in shards]
        most = max(blocks, *(len(found) for found in cut))
        places = torch.zeros(len(cut), most, 3, dtype=torch.int64)
        for row, found in zip(places, cut, strict=True):
            row[: len(found), :2] = found
        if (longest := max(sum(high - low for low, high in ranges) for ranges in shards)) > _MOST:
            raise UserError(
                f"a shard of {longest:,} gradients is longer than {_MOST:,}, the most for blocks that follow "
                "parameters: set megatron.ddp_bucket_size, or use more data-parallel ranks"
            )
        needed = words_of(places[..., 1], block, bits)
        places[..., 2] = needed.cumsum(1) - needed
        return BlockTable(places.to(torch.int32), int(needed.sum(1).max()))

    def shards(self, first: int, count: int, step: int) -> BlockTable:
        """The table of `count` of the shards, each `step`-th."""
        chosen = slice(first, first + step * count, step)
        source = (self, chosen) if step == 1 else None  # whose copies serve this one too
        return BlockTable(self.places[chosen].contiguous(), self.words, _source=source)

    def on(self, device: torch.device) -> torch.Tensor:
        """`places` on a device; copied there once."""
        if device not in self._copies:
            if self._source is None:
                self._copies[device] = self.places.to(device)
            else:
                table, chosen = self._source
                self._copies[device] = table.on(device)[chosen]
        return self._copies[device]

    @functools.cached_property
    def multiples_of_16(self) -> bool:
        """Whether every block begins at a multiple of 16 elements of its shard, and has such a number."""
        if self._source is not None:
            return self._source[0].multiples_of_16
        return not bool((self.places[..., :2] & 15).any())

    def is_regular(self, lengths: Sequence[int], block: int) -> bool:
        """Whether the blocks are those that are counted from each shard's beginning, `lengths` being the
        shards'; what is in no block may only be whole ones."""
        start, length = self.places[..., 0], self.places[..., 1]
        whole = (length == block) | (start + length == torch.tensor(lengths)[:, None])
        return bool(((length == 0) | (start % block == 0) & whole).all())

    def elements(self, block: int, size: int, device: torch.device) -> torch.Tensor:
        """Which of its shard's `size` elements is each of a block's, int64 [N, blocks, b]; fill: `size`."""
        places = self.on(device).to(torch.int64)
        inside = torch.arange(block, device=device)
        return torch.where(inside < places[..., 1:2], places[..., :1] + inside, size)

    def code_bytes(self, block: int, bits: int, device: torch.device) -> torch.Tensor:
        """Which byte of its shard's codes is each of a whole block's, int64 [N, blocks, b*p/8]; for those
        that a block does not need the one behind them all."""
        places = self.on(device).to(torch.int64)
        width = word_bytes(block, bits)
        first, found = places[..., 2:], []
        for _, plane in planes(bits):
            inside = torch.arange(block * plane // 8, device=device)
            needed = _words(places[..., 1:2], plane, width)
            found.append(torch.where(inside < needed * width, first * width + inside, self.words * width))
            first = first + needed
        return torch.cat(found, dim=-1)


def word_bytes(block: int, bits: int) -> int:
    """Bytes of a word of codes: 4, or 2 where a plane of a block's (packing.py) has no more."""
    return min(4, block * min(width for _, width in planes(bits)) // 8)


def words_of(lengths: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    """How many words the codes of blocks of `lengths` elements take; each plane of them begins a word."""
    width = word_bytes(block, bits)
    return torch.stack([_words(lengths, plane, width) for _, plane in planes(bits)]).sum(0)


def _words(lengths: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    return -(-lengths * bits // (8 * width))


def _cut(starts: torch.Tensor, ends: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """(place, length) of the blocks' parts within the ranges, which lie one after the other, int64 [n, 2]."""
    found, before = [starts.new_empty(0, 2)], 0
    for low, high in ranges:
        first = int(torch.searchsorted(ends, low, right=True))
        last = int(torch.searchsorted(starts, high))
        start, end = starts[first:last].clamp(min=low), ends[first:last].clamp(max=high)
        found.append(torch.stack([start - low + before, end - start], dim=1))
        before += high - low
    blocks = torch.cat(found)
    return blocks[blocks[:, 1] > 0]


def ranges_within(whole: Sequence[Range], ranges: Sequence[Range]) -> Iterator[Range]:
    """The parts of `whole` within a shard of some ranges, counted from the shard's beginning."""
    before = 0
    for low, high in ranges:
        for start, end in whole:
            if max(start, low) < min(end, high):
                yield max(start, low) - low + before, min(end, high) - low + before
        before += high - low
