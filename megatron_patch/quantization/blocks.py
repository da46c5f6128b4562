"""Which elements of a tensor form a block, if blocks follow the tensor's parameters.

Blocks of b elements are counted from the beginning of every row of every parameter, and cut where a shard
ends. So no block holds elements of two rows, and a row whose gradient is zero is sent as zeros, whatever its
neighbours are. Elements of no parameter, such as Megatron's padding, are in no block: they are not sent, and
arrive as zero.

    parameter of 3 rows of 200, b = 128   |128|72||128|72||128|72|
    with a shard's end in it              |128|72||30 ¦ 98|72||128|72|

A BlockTable has every shard's blocks as runs of equal rows, of which a model has some thousands. The blocks
are listed one by one, in 12 bytes each, when an exchange first runs. In a payload each block's codes begin at
a whole word, so that no two blocks share a byte.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch

from megatron_patch.errors import UserError

SHORTEST_ROW = 16
"""The least elements of a row. The shorter rows of a parameter count as one row: a scale for each of them
would cost more than 1 bit per element."""

_MOST = 2**31 - 1
"""The most elements of a shard: a table lists positions as int32."""

Range = tuple[int, int]
"""(first element, end): the end is the index after the last element."""


@dataclass(frozen=True)
class Span:
    """One parameter's place in a tensor: `length` elements from `start` on, in rows of `row` elements.

    If the tensor is a part of another one, a parameter may begin before it (`start` < 0) or end after it.
    """

    start: int
    length: int
    row: int
    exact: bool = False
    """Whether the parameter is in no block, but is sent uncompressed (exact.py)."""

    @staticmethod
    def of(start: int, shape: Sequence[int], exact: bool = False) -> Span:
        """Create the span of a parameter of `shape`; its first axis counts rows, and a vector is one row."""
        length = row = 1
        for axis, size in enumerate(shape):
            length *= size
            row *= size if axis or len(shape) == 1 else 1
        return Span(start, length, row if row >= SHORTEST_ROW else max(length, 1), exact)


@dataclass(frozen=True)
class Contents:
    """The contents of an exchanged tensor: `numel` elements, and the places of its parameters.

    If `spans` is None, the parameters are unknown, and blocks are counted from each shard's beginning.
    """

    numel: int
    spans: tuple[Span, ...] | None = None

    def part(self, start: int, numel: int) -> Contents:
        """Return the contents of `numel` elements from `start` on, in which blocks lie as in the whole."""
        if self.spans is None:
            return Contents(numel)
        inside = [
            span for span in self.spans if span.start < start + numel and start < span.start + span.length
        ]
        return Contents(numel, tuple(replace(span, start=span.start - start) for span in inside))


@dataclass(frozen=True)
class Run:
    """`rows` rows, or parts of rows, of `length` elements, end to end from element `place` of a shard on.

    If a row begins in another shard, the last block that it has there has `lead` elements, by which the first
    block here is shorter; if it ends there with a whole block, `lead` is 0.
    """

    place: int
    length: int
    lead: int = 0
    rows: int = 1

    def row_blocks(self, block: int) -> list[tuple[int, int]]:
        """Return (elements of a block, number of such blocks) for the blocks of one row, in their order."""
        first = min(block - self.lead, self.length)
        whole, last = divmod(self.length - first, block)
        return [(first, 1), (block, whole), (last, 1 if last else 0)]

    def blocks(self, block: int) -> int:
        """Return the number of blocks in all rows."""
        return self.rows * sum(count for _, count in self.row_blocks(block))

    def words(self, block: int, bits: int) -> int:
        """Return the number of words of all rows' codes."""
        return self.rows * sum(count * words_of(n, block, bits) for n, count in self.row_blocks(block))

    def multiples_of(self, number: int, block: int) -> bool:
        """Whether all blocks begin at, and have, a multiple of `number` elements."""
        places = [n for n, count in self.row_blocks(block) if count]
        return not any(n % number for n in (self.place, self.length, *places))

    def write(self, table: torch.Tensor, word: int, block: int, bits: int) -> None:
        """Write this run's rows of `BlockTable.on`, int32 [blocks, 3] on CPU; codes begin at `word`."""
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
    block: int
    bits: int
    blocks: int
    """The number of blocks of the shard that has most of them."""
    words: int
    """The words of codes in a payload: as many as the shard that has most of them needs."""
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)
    _source: tuple[BlockTable, slice] | None = field(default=None, repr=False)

    @staticmethod
    def of(spans: Sequence[Span], shards: Sequence[Sequence[Range]], block: int, bits: int) -> BlockTable:
        """Create the table of shards, each given as the ranges of the tensor that it consists of.

        Every shard gets at least one block.

        Raises:
            UserError: a shard has more than 2^31 - 1 elements.
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
            max(1, *(sum(run.blocks(block) for run in of_shard) for of_shard in runs)),
            max(sum(run.words(block, bits) for run in of_shard) for of_shard in runs),
        )

    def shards(self, first: int, count: int, step: int) -> BlockTable:
        """Select `count` shards, from `first` on and `step` apart."""
        chosen = slice(first, first + step * count, step)
        source = (self, chosen) if step == 1 else None  # A slice of its copies on devices is used then.
        return replace(self, runs=self.runs[chosen], _copies={}, _source=source)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the list of blocks, int32 [N, blocks, 3], on a device.

        The three numbers are the block's first element in its shard, its number of elements, and the word of
        the shard's codes where its codes begin. A shard with fewer blocks than another one ends with empty
        blocks. The list is made once, shard by shard, so that the host has one shard's at a time.
        """
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
        return self.on(torch.device("cpu"))

    @functools.cached_property
    def multiples_of_16(self) -> bool:
        """Whether every block begins at, and has, a multiple of 16 elements."""
        if self._source is not None:
            return self._source[0].multiples_of_16
        return all(run.multiples_of(16, self.block) for runs in self.runs for run in runs)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether every block has b elements; a shard may still have fewer blocks than another one."""
        if self._source is not None:
            return self._source[0].whole
        return all(run.lead == 0 and run.length % self.block == 0 for runs in self.runs for run in runs)

    def elements(self, block: int, size: int, device: torch.device) -> torch.Tensor:
        """Return each block's elements as indices in their shard, int64 [N, blocks, b]; `size` for fill."""
        places = self.on(device).to(torch.int64)
        inside = torch.arange(block, device=device)
        return torch.where(inside < places[..., 1:2], places[..., :1] + inside, size)

    def code_bytes(self, block: int, bits: int, device: torch.device) -> torch.Tensor:
        """Return each block's bytes of codes as indices in its shard's codes, int64 [N, blocks, b*p/8].

        Bytes that a short block does not need have the index after all codes.
        """
        places = self.on(device).to(torch.int64)
        width = word_bytes(block, bits)
        inside = torch.arange(block * bits // 8, device=device)
        needed = words_of(places[..., 1:2], block, bits) * width
        return torch.where(inside < needed, places[..., 2:] * width + inside, self.words * width)


def word_bytes(block: int, bits: int) -> int:
    """Return the bytes of a word of codes: 4, or 2 if a block's codes have only 2."""
    return min(4, block * bits // 8)


@overload
def words_of(lengths: int, block: int, bits: int) -> int: ...


@overload
def words_of(lengths: torch.Tensor, block: int, bits: int) -> torch.Tensor: ...


def words_of(lengths: int | torch.Tensor, block: int, bits: int) -> int | torch.Tensor:
    """Return the number of words of the codes of blocks of `lengths` elements."""
    return -(-lengths * bits // (8 * word_bytes(block, bits)))


Ordered = tuple[Sequence[Span], Sequence[int]]
"""Spans sorted by their start, and the end of each."""


def in_order(spans: Iterable[Span]) -> Ordered:
    """Sort spans once for all shards: FSDP2's tensors have a span for each parameter of each rank."""
    ordered = sorted((span for span in spans if span.length), key=lambda span: span.start)
    return ordered, [span.start + span.length for span in ordered]


def within(spans: Ordered, ranges: Sequence[Range]) -> Iterator[tuple[Span, int, int, int]]:
    """Yield the parts of spans that lie in a shard, which consists of `ranges`, one after the other.

    Each is (span, first element, end, place): the first two are counted from the span's beginning, and
    `place` is the first element's index in the shard.
    """
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
    """Yield the runs of a span's elements `first` to `last` - 1, which begin at `place` in their shard."""
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
