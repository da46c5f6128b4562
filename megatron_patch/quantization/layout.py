"""How a tensor is cut into shards and blocks, and how a shard's payload is laid out.

A tensor of B elements (a bucket, or part of one) is cut into N shards: shard j is elements [j*S, (j+1)*S),
S = ceil(B/N). Megatron pads the buckets of its distributed optimizer so that N divides B; elsewhere the last
shards are short, or empty. Each shard is cut into blocks of up to b elements that share one scale; no block
crosses a shard. If the parameters are known, blocks are counted from the beginning of their rows (blocks.py),
else from the beginning of the shard. A shard's payload is contiguous, with parts aligned for vector loads:

    | codes | zeros to a multiple of 16 | scales: bf16 | zeros to 16 | exact elements: fp32 | zeros to 16 |

Codes lie block by block, and the codes of each block begin at a whole word. All payloads have as many bytes
of codes and scales as the shard that needs most of them, and their own number of exact elements. At p = 4,
b = 128 and whole blocks a payload has 4 + 16/128 = 4.125 bits per element.
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
    """How `numel` (B) elements are cut: `shards` (N) shards of `shard_size` (S) elements, `bits` (p) each.

    `block` (b) is the most elements that share a scale; with `block_size: shard` it is S, rounded up to a
    multiple of 32. `table` lists the blocks, `exact` the elements that are sent uncompressed. `by_shard` says
    that blocks are counted from the beginning of each shard, not of each parameter's rows.
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
    ) -> BlockLayout:
        """Create the layout of `numel` elements in `shards` shards.

        With `whole_blocks` S is a multiple of the block size, so that fewer blocks are cut at shards' ends.
        `spans` are the parameters that blocks follow; None: blocks are counted from each shard's beginning.
        """
        size = -(-numel // shards)
        if whole_blocks and block_size != "shard":
            size = _round_up(size, int(block_size))
        if spans is None or block_size == "shard":
            return BlockLayout.by_shards(numel, shards, size, bits, block_size)
        ends = [(j * size, min((j + 1) * size, numel)) for j in range(shards)]
        ranges = [[(first, max(first, end))] for first, end in ends]
        table = BlockTable.of(spans, ranges, int(block_size), bits)
        exact = ExactElements.of(spans, ranges, size)
        return BlockLayout(numel, shards, size, bits, int(block_size), table, exact)

    @staticmethod
    def by_shards(numel: int, shards: int, size: int, bits: int, block_size: int | str) -> BlockLayout:
        """Create the layout of shards of `size` elements, with blocks counted from each shard's beginning."""
        ends = [min((j + 1) * size, numel) for j in range(shards)]
        spans = [Span(j * size, max(end - j * size, 0), size) for j, end in enumerate(ends)]
        ranges = [[(span.start, span.start + span.length)] for span in spans]
        block = _round_up(max(size, 1), 32) if block_size == "shard" else int(block_size)
        table = BlockTable.of(spans, ranges, block, bits)
        return BlockLayout(numel, shards, size, bits, block, table, by_shard=True)

    def part(self, first: int, count: int = 1, step: int = 1) -> BlockLayout:
        """Return the layout of `count` shards, from `first` on and `step` apart; payloads are the same."""
        chosen = range(self.shards)[first::step][:count]
        numel = sum(min(max(self.numel - at * self.shard_size, 0), self.shard_size) for at in chosen)
        exact = None if self.exact is None else self.exact.shards(first, count, step)
        table = self.table.shards(first, count, step)
        return replace(self, numel=numel, shards=count, table=table, exact=exact)

    @property
    def blocks(self) -> int:
        """The number of blocks, and so of scales, of one shard."""
        return self.table.blocks

    @functools.cached_property
    def code_bytes(self) -> int:
        """The bytes of one shard's packed codes, padding included."""
        return _round_up(self.table.words * word_bytes(self.block, self.bits), _ALIGNMENT)

    @functools.cached_property
    def coded_bytes(self) -> int:
        """The bytes of one shard's codes and scales, after which its exact elements begin."""
        return _round_up(self.code_bytes + 2 * self.blocks, _ALIGNMENT)

    @functools.cached_property
    def payload_sizes(self) -> list[int]:
        """The bytes of each shard's payload."""
        exact = [0] * self.shards if self.exact is None else self.exact.nbytes
        return [self.coded_bytes + _round_up(nbytes, _ALIGNMENT) for nbytes in exact]

    @functools.cached_property
    def payload_bytes(self) -> int:
        """The bytes of the longest payload."""
        return max(self.payload_sizes)

    @functools.cached_property
    def payload_starts(self) -> torch.Tensor:
        """The byte where each shard's payload begins, if all lie end to end, and where the last one ends;
        int64 [N + 1] on CPU."""
        return torch.tensor([0, *self.payload_sizes], device="cpu").cumsum(0)

    def payload_starts_on(self, device: torch.device) -> torch.Tensor:
        """Return `payload_starts` in units of 16 bytes, int32, on a device; it is copied there only once."""
        if device not in self._starts:
            self._starts[device] = (self.payload_starts // _ALIGNMENT).to(torch.int32).to(device)
        return self._starts[device]

    @functools.cached_property
    def _starts(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Cut [B] of any float dtype into fp32 [N, blocks, b], with zeros in short shards and blocks."""
        whole = F.pad(flat.to(torch.float32), (0, self.shards * self.shard_size - flat.numel()))
        places = self.table.elements(self.block, self.shard_size, flat.device)
        rows = F.pad(whole.view(self.shards, -1), (0, 1))
        return rows.gather(1, places.view(self.shards, -1)).view(places.shape)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """Join [n, blocks, b] to [n, S], without the fill of blocks; elements in no block become 0.

        n is N; or this layout has one shard, of which there are n copies.
        """
        places = self.table.elements(self.block, self.shard_size, blocks.device).view(self.shards, -1)
        joined = blocks.new_zeros(blocks.shape[0], self.shard_size + 1)
        joined.scatter_(1, places.expand(blocks.shape[0], -1), blocks.reshape(blocks.shape[0], -1))
        return joined[:, : self.shard_size]

    def flat(self, blocks: torch.Tensor) -> torch.Tensor:
        """Join [N, blocks, b] to [B], without any fill: the inverse of `cut`."""
        return self.join(blocks).reshape(-1)[: self.numel]

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Return the number of elements of each block, without fill: int64 [N, blocks]."""
        return self.table.on(device)[..., 1].to(torch.int64)
