"""How a tensor is cut into shards and blocks, and how a shard's payload is laid out.

A tensor of B elements (a bucket, or part of one) belongs to N ranks: shard j = elements [j*S, (j+1)*S), S =
ceil(B/N). Megatron pads the buckets of its distributed optimizer so that N divides B; elsewhere the last
shards are short, or empty. Each shard is cut into blocks of up to b elements that share one scale. No block
crosses a shard. Where the parameters are known, blocks are counted from each one's beginning (blocks.py),
else from the shard's. A shard's payload is its packed codes, then its scales, contiguous:

    | codes | zeros to a multiple of 16 | scales: bf16 | zeros to 16 | exact elements: fp32 | zeros to 16 |

so that every shard's payload and its scales start at an address that vector loads like. Codes lie block by
block, each block's from a whole word on (codes of several planes, packing.py: each plane of each block). All
payloads have the codes and scales of the shard which needs most of them, and exact elements of their own.
At p = 4, b = 128 and whole blocks that is 4 + 16/128 = 4.125 bits an element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron_patch.quantization.blocks import BlockTable, Span, word_bytes
from megatron_patch.quantization.exact import ExactElements

_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BlockLayout:
    """The cut of `numel` (B) elements: `shards` (N) shards of `shard_size` (S) elements, `bits` (p) each.

    `block` is the largest number of elements that share a scale (b); for `block_size: shard` it is S, rounded
    up to a multiple of 32. `table` lists the blocks, `exact` the elements that are sent as they are.
    `by_shard` says that blocks are counted from each shard's beginning, and not from the parameters'.
    """

    numel: int
    shards: int
    shard_size: int
    bits: int
    block: int
    table: BlockTable
    exact: ExactElements | None = None
    by_shard: bool = False

    @staticmethod
    def of(
        numel: int,
        shards: int,
        bits: int,
        block_size: int | str,
        whole_blocks: bool = False,
        spans: Sequence[Span] | None = None,
        pieces: int = 1,
        in_order: bool = False,
    ) -> BlockLayout:
        """The layout of `numel` elements that `shards` ranks share.

        With `whole_blocks` shards are multiples of the block, so that few blocks are cut where one ends.
        `spans` are the parameters that blocks follow (None: blocks are counted from each shard's
        beginning). With `pieces` M > 1 blocks are cut where any of M*N stretches of one length ends. Shard
        j has numbers j*M to j*M + M - 1 of them where they are `in_order`; else the tensor was put in
        another order after `spans` were computed, and it has j, N + j, 2*N + j, ..., one after the other.
        """
        size = -(-numel // shards)
        if whole_blocks and block_size != "shard":
            size = _round_up(size, int(block_size))
        if spans is None or block_size == "shard":
            return BlockLayout.by_shards(numel, shards, size, bits, block_size)
        length = size // pieces
        across, along = (pieces, 1) if in_order else (1, shards)
        firsts = [[length * (j * across + k * along) for k in range(pieces)] for j in range(shards)]
        ranges = [[(at, max(at, min(at + length, numel))) for at in row] for row in firsts]
        table = BlockTable.of(spans, ranges, int(block_size), bits)
        exact = ExactElements.of(spans, ranges, size)
        return BlockLayout(numel, shards, size, bits, int(block_size), table, exact)

    @staticmethod
    def by_shards(numel: int, shards: int, size: int, bits: int, block_size: int | str) -> BlockLayout:
        """The layout of shards of `size` elements whose blocks are counted from each one's beginning."""
        ends = [min((j + 1) * size, numel) for j in range(shards)]
        spans = [Span(j * size, max(end - j * size, 0), size) for j, end in enumerate(ends)]
        ranges = [[(span.start, span.start + span.length)] for span in spans]
        block = _round_up(max(size, 1), 32) if block_size == "shard" else int(block_size)
        table = BlockTable.of(spans, ranges, block, bits)
        return BlockLayout(numel, shards, size, bits, block, table, by_shard=True)

    def part(self, first: int, count: int = 1, step: int = 1) -> BlockLayout:
        """The layout of `count` of the shards, each `step`-th: the same blocks, and payloads of that size."""
        chosen = range(self.shards)[first::step][:count]
        numel = sum(min(max(self.numel - at * self.shard_size, 0), self.shard_size) for at in chosen)
        exact = None if self.exact is None else self.exact.shards(first, count, step)
        table = self.table.shards(first, count, step)
        return replace(self, numel=numel, shards=count, table=table, exact=exact)

    @property
    def blocks(self) -> int:
        """Blocks, and so scales, of one shard."""
        return self.table.blocks

    @functools.cached_property
    def code_bytes(self) -> int:
        """Bytes of one shard's packed codes, alignment included."""
        return _round_up(self.table.words * word_bytes(self.block, self.bits), _ALIGNMENT)

    @functools.cached_property
    def coded_bytes(self) -> int:
        """Bytes of one shard's codes and scales: where in a payload its exact elements begin."""
        return _round_up(self.code_bytes + 2 * self.blocks, _ALIGNMENT)

    @functools.cached_property
    def payload_sizes(self) -> list[int]:
        """Bytes of each shard's payload: as many codes and scales in all, and its own exact elements."""
        exact = [0] * self.shards if self.exact is None else self.exact.nbytes
        return [self.coded_bytes + _round_up(nbytes, _ALIGNMENT) for nbytes in exact]

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of the longest payload."""
        return max(self.payload_sizes)

    @functools.cached_property
    def payload_starts(self) -> torch.Tensor:
        """Where each shard's payload begins among those of all shards, end to end, and where the last one
        ends: in bytes, int64 [N + 1], on CPU."""
        return torch.tensor([0, *self.payload_sizes], device="cpu").cumsum(0)

    def payload_starts_on(self, device: torch.device) -> torch.Tensor:
        """`payload_starts` on a device, in units of 16 bytes, int32; copied there once."""
        if device not in self._starts:
            self._starts[device] = (self.payload_starts // _ALIGNMENT).to(torch.int32).to(device)
        return self._starts[device]

    @functools.cached_property
    def _starts(self) -> dict[torch.device, torch.Tensor]:
        return {}

    @functools.cached_property
    def by_width(self) -> list[tuple[torch.Tensor, BlockLayout]]:
        """The blocks, those of about one length together: which of all shards' blocks they are, int64 [n] on
        CPU, and a layout of them alone. Where rows are far shorter than b, [N, blocks, b] is fill nearly
        everywhere; here at most every second element is."""
        lengths = self.lengths(torch.device("cpu")).flatten()
        firsts = self.table.places[..., 0].to(torch.int64)
        starts = (firsts + torch.arange(self.shards, device="cpu")[:, None] * self.shard_size).flatten()
        exponents = (lengths - 1).clamp(min=0).to(torch.float64).frexp().exponent
        found = []
        for exponent in exponents[lengths > 0].unique().tolist():
            which = ((exponents == exponent) & (lengths > 0)).nonzero().flatten()
            listed = torch.stack([starts[which], lengths[which], torch.zeros_like(which)], dim=-1)[None]
            block = min(1 << exponent, self.block)
            table = BlockTable((), block, self.bits, len(which), 0, {listed.device: listed})
            whole = replace(self, shards=1, shard_size=self.shards * self.shard_size)
            found.append((which, replace(whole, block=block, table=table)))
        return found

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """[B] of any float dtype -> fp32 [N, blocks, b], short shards and blocks filled with zeros."""
        whole = F.pad(flat.to(torch.float32), (0, self.shards * self.shard_size - flat.numel()))
        places = self.table.elements(self.block, self.shard_size, flat.device)
        rows = F.pad(whole.view(self.shards, -1), (0, 1))
        return rows.gather(1, places.view(self.shards, -1)).view(places.shape)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, blocks, b] -> [n, S], without the fill of blocks; 0 for what is in no block.

        Where n is not N, the n are of one and the same shard, the only one of this layout.
        """
        places = self.table.elements(self.block, self.shard_size, blocks.device).view(self.shards, -1)
        joined = blocks.new_zeros(blocks.shape[0], self.shard_size + 1)
        joined.scatter_(1, places.expand(blocks.shape[0], -1), blocks.reshape(blocks.shape[0], -1))
        return joined[:, : self.shard_size]

    def flat(self, blocks: torch.Tensor) -> torch.Tensor:
        """[N, blocks, b] -> [B], without any fill: the inverse of `cut`."""
        return self.join(blocks).reshape(-1)[: self.numel]

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Number of real elements of each block, int64 [N, blocks]; 0 in an empty one."""
        return self.table.on(device)[..., 1].to(torch.int64)
