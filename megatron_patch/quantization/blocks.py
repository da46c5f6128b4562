"""Which elements share a scale, where blocks follow the parameters that a tensor is made of.

Blocks of b elements are counted from the beginning of every row of every parameter, and cut where a shard
ends. So no block holds elements of two rows, and a row whose gradient is zero is sent as zeros, whatever its
neighbours are. What belongs to no parameter, such as Megatron's padding, is in no block: it is not sent, and
arrives as zero.

    parameter of 3 rows of 200, b = 128   |128|72||128|72||128|72|
    with a shard's end in it              |128|72||30 ¦ 98|72||128|72|

A table holds every shard's blocks as runs of equal rows, of which a model has some thousands. They are listed
one by one, in 12 bytes each, when an exchange first runs. On the wire a block's codes begin at a whole word,
so that no two blocks share a byte.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

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


@dataclass(frozen=True)
class Contents:
    """The contents of an exchanged tensor: `numel` elements, and where the parameters lie in them.

    If `spans` is None, the parameters are unknown: blocks are counted from each shard's beginning.
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


@dataclass(frozen=True)
class Run:
    """`rows` stretches of `length` elements, end to end from element `place` of a shard on.

    Blocks are counted from `lead` elements before each stretch, which are in another shard.
    """

    place: int
    length: int
    lead: int = 0
    rows: int = 1

    def row_blocks(self, block: int) -> list[tuple[int, int]]:
        """(elements, how many) of the blocks of one stretch, in their order."""
        first = min(block - self.lead, self.length)
        whole, last = divmod(self.length - first, block)
        return [(first, 1), (block, whole), (last, 1 if last else 0)]

    def blocks(self, block: int) -> int:
        """How many there are in all stretches."""
        return self.rows * sum(count for _, count in self.row_blocks(block))

    def words(self, block: int, bits: int) -> int:
        """Words of all stretches' codes."""
        return self.rows * sum(count * words_of(n, block, bits) for n, count in self.row_blocks(block))

    def multiples_of(self, number: int, block: int) -> bool:
        """Whether all its blocks begin at multiples of `number`, and have such a number of elements."""
        places = [n for n, count in self.row_blocks(block) if count]
        return not any(n % number for n in (self.place, self.length, *places))

    def write(self, table: torch.Tensor, word: int, block: int, bits: int) -> None:
        """Write its rows of BlockTable.on, int32 [blocks, 3] on CPU; its codes begin with number `word`."""
        begins = torch.arange(-self.lead, self.length, block, device="cpu")
        ends = (begins + block).clamp(max=self.length)
        begins = begins.clamp(min=0)
        needed = words_of(ends - begins, block, bits)
        row = torch.arange(self.rows, device="cpu")[:, None]
        of_rows = table.view(self.rows, len(begins), 3)
        of_rows[..., 0] = self.place + row * self.length + begins
        of_rows[..., 1] = ends - begins
        of_rows[..., 2] = word + row * needed.sum() + needed.cumsum(0) - needed


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of N shards, in their order."""

    runs: tuple[tuple[Run, ...], ...]
    """The runs of each shard."""
    block: int
    bits: int
    blocks: int
    """The number of blocks in the shard that has most of them."""
    words: int
    """Words of codes in one payload: as many as the shard with most of them needs."""
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)
    _source: tuple[BlockTable, slice] | None = field(default=None, repr=False)

    @staticmethod
    def of(
        spans: Sequence[Span], shards: Sequence[Sequence[Range]], block: int, bits: int, blocks: int = 1
    ) -> BlockTable:
        """The table of shards, each of the tensor's elements in some ranges, one after the other.

        `blocks` is the least number of blocks that every shard is given.

        Raises:
            UserError: a shard has more elements than a table can tell apart.
        """
        if (longest := max(sum(high - low for low, high in ranges) for ranges in shards)) > _MOST:
            raise UserError(
                f"a shard of {longest:,} gradients is longer than {_MOST:,}, the most for blocks that follow "
                "parameters: set megatron.ddp_bucket_size, or use more data-parallel ranks"
            )
        coded = in_order(span for span in spans if not span.exact)
        runs = tuple(
            tuple(run for part in within(coded, ranges) for run in _runs(*part, block)) for ranges in shards
        )
        return BlockTable(
            runs,
            block,
            bits,
            max(blocks, *(sum(run.blocks(block) for run in of_shard) for of_shard in runs)),
            max(sum(run.words(block, bits) for run in of_shard) for of_shard in runs),
        )

    def shards(self, first: int, count: int, step: int) -> BlockTable:
        """The table of `count` of the shards, each `step`-th."""
        chosen = slice(first, first + step * count, step)
        source = (self, chosen) if step == 1 else None  # whose copies serve this one too
        return replace(self, runs=self.runs[chosen], _copies={}, _source=source)

    def on(self, device: torch.device) -> torch.Tensor:
        """int32 [N, blocks, 3] on a device: where in its shard a block begins, its number of elements, and
        where in the shard's codes its own begin, in words. A shard with less blocks than others ends with
        empty ones. Listed and copied there once, shard by shard: the host holds one of them at a time."""
        if device not in self._copies:
            if self._source is None:
                shape = len(self.runs), self.blocks, 3
                listed = torch.empty(shape, dtype=torch.int32, device=device)
                for shard, runs in zip(listed, self.runs, strict=True):
                    self._list(runs, shard)
                self._copies[device] = listed
            else:
                table, chosen = self._source
                self._copies[device] = table.on(device)[chosen]
        return self._copies[device]

    def _list(self, runs: Sequence[Run], shard: torch.Tensor) -> None:
        listed = shard if shard.device.type == "cpu" else torch.empty_like(shard, device="cpu")
        at = word = 0
        for run in runs:
            count = run.blocks(self.block)
            run.write(listed[at : at + count], word, self.block, self.bits)
            at, word = at + count, word + run.words(self.block, self.bits)
        listed[at:, :2] = 0
        listed[at:, 2] = word
        if listed is not shard:
            shard.copy_(listed)

    @property
    def places(self) -> torch.Tensor:
        """`on` the CPU."""
        return self.on(torch.device("cpu"))

    @functools.cached_property
    def multiples_of_16(self) -> bool:
        """Whether every block begins at a multiple of 16 elements of its shard, and has such a number."""
        if self._source is not None:
            return self._source[0].multiples_of_16
        return all(run.multiples_of(16, self.block) for runs in self.runs for run in runs)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether every block has all of its elements; a shard may have fewer blocks than others."""
        if self._source is not None:
            return self._source[0].whole
        return all(run.lead == 0 and run.length % self.block == 0 for runs in self.runs for run in runs)

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


@overload
def words_of(lengths: int, block: int, bits: int) -> int: ...


@overload
def words_of(lengths: torch.Tensor, block: int, bits: int) -> torch.Tensor: ...


def words_of(lengths: int | torch.Tensor, block: int, bits: int) -> int | torch.Tensor:
    """How many words the codes of blocks of `lengths` elements take; each plane of them begins a word."""
    width = word_bytes(block, bits)
    return sum(_words(lengths, plane, width) for _, plane in planes(bits))


def _words(lengths: Any, bits: int, width: int) -> Any:
    return -(-lengths * bits // (8 * width))


Ordered = tuple[Sequence[Span], Sequence[int]]
"""Spans in the order of their places, and where each ends."""


def in_order(spans: Iterable[Span]) -> Ordered:
    """Sorted once for all shards: FSDP2's tensors have a span for each parameter of each rank."""
    found = sorted((span for span in spans if span.length), key=lambda span: span.start)
    return found, [span.start + span.length for span in found]


def within(spans: Ordered, ranges: Sequence[Range]) -> Iterator[tuple[Span, int, int, int]]:
    """The parts of spans that lie in a shard of some ranges, one after the other: (the span, the part's first
    element and the one behind its last, counted from the span's, and where in the shard it begins)."""
    ordered, ends = spans
    before = 0
    for low, high in ranges:
        for span in itertools.islice(ordered, bisect.bisect_right(ends, low), None):
            if span.start >= high:
                break
            first, last = max(low, span.start), min(high, span.start + span.length)
            if first < last:
                yield span, first - span.start, last - span.start, first - low + before
        before += high - low


def _runs(span: Span, first: int, last: int, place: int, block: int) -> Iterator[Run]:
    """The elements of a span from `first` to before `last`, which begin at `place` of their shard."""
    inside = first % span.row
    if inside:
        length = min(span.row - inside, last - first)
        yield Run(place, length, inside % block)
        first, place = first + length, place + length
    rows, rest = divmod(last - first, span.row)
    if rows:
        yield Run(place, span.row, rows=rows)
    if rest:
        yield Run(place + rows * span.row, rest)
