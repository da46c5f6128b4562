"""How a bucket is cut, and how its shards lie on the wire.

A bucket of B elements belongs to N ranks: shard j = elements [j*S, (j+1)*S), S = B/N. Each shard is cut
into ceil(S/b) blocks of b elements that share one scale; the last block may be short, and no block
crosses a shard. A shard's payload is its packed codes, then its scales, contiguous:

    | codes: ceil(S*p/8) bytes | zeros to a multiple of 16 | scales: bf16 [ceil(S/b)] | zeros to 16 |

so that every shard's payload and its scales start at an address that vector loads like. At p = 4, b = 128
that is 4 + 16/128 = 4.125 bits an element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BlockLayout:
    """The cut of one bucket: `shards` (N) shards of `shard_size` (S) elements, `bits` (p) each.

    `block` is the number of elements that share a scale (b); for `block_size: shard` it is S itself.
    """

    shards: int
    shard_size: int
    bits: int
    block: int

    @staticmethod
    def of(numel: int, shards: int, bits: int, block_size: int | str) -> BlockLayout:
        """The layout of a bucket of `numel` elements; `numel` must divide evenly among `shards`."""
        if numel % shards:
            raise ValueError(f"a bucket of {numel} elements does not divide among {shards} ranks")
        size = numel // shards
        return BlockLayout(shards, size, bits, size if block_size == "shard" else int(block_size))

    @property
    def numel(self) -> int:
        """Elements of the whole bucket (B)."""
        return self.shards * self.shard_size

    @property
    def blocks(self) -> int:
        """Blocks, and so scales, of one shard."""
        return -(-self.shard_size // self.block)

    @property
    def code_bytes(self) -> int:
        """Bytes of one shard's packed codes, alignment included."""
        return _round_up(-(-self.shard_size * self.bits // 8), _ALIGNMENT)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one shard's payload."""
        return _round_up(self.code_bytes + 2 * self.blocks, _ALIGNMENT)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """[N*S] of any float dtype -> fp32 [N, blocks, b], short last blocks filled with zeros."""
        shards = flat.view(self.shards, self.shard_size).to(torch.float32)
        missing = self.blocks * self.block - self.shard_size
        return F.pad(shards, (0, missing)).view(self.shards, self.blocks, self.block)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, blocks, b] -> [n, S], without the fill."""
        return blocks.reshape(blocks.shape[0], -1)[:, : self.shard_size]

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Number of real elements of each block of a shard, int64 [blocks]."""
        lengths = torch.full((self.blocks,), self.block, dtype=torch.int64, device=device)
        lengths[-1] = self.shard_size - (self.blocks - 1) * self.block
        return lengths
