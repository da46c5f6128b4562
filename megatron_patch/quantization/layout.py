"""How a bucket is cut, and how its shards lie on the wire.

A bucket of B elements belongs to N ranks: shard j = elements [j*S, (j+1)*S), S = ceil(B/N). Megatron pads
the buckets of its distributed optimizer so that N divides B; elsewhere the last shards are short, or empty,
and lie on the wire as if zeros followed. Each shard is cut into ceil(S/b) blocks of b elements that share
one scale; the last block may be short, and no block crosses a shard. A shard's payload is its packed codes,
then its scales, contiguous:

    | codes: ceil(S*p/8) bytes | zeros to a multiple of 16 | scales: bf16 [ceil(S/b)] | zeros to 16 |

so that every shard's payload and its scales start at an address that vector loads like. At p = 4, b = 128
that is 4 + 16/128 = 4.125 bits an element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BlockLayout:
    """The cut of `numel` (B) elements: `shards` (N) shards of `shard_size` (S) elements, `bits` (p) each.

    `block` is the number of elements that share a scale (b); for `block_size: shard` it is S itself.
    """

    numel: int
    shards: int
    shard_size: int
    bits: int
    block: int

    @staticmethod
    def of(
        numel: int, shards: int, bits: int, block_size: int | str, whole_blocks: bool = False
    ) -> BlockLayout:
        """The layout of a bucket of `numel` elements that `shards` ranks share.

        With `whole_blocks` shards are multiples of the block: blocks lie where they would in one shard, and
        do not straddle parameters that begin at multiples of it.
        """
        size = -(-numel // shards)
        if whole_blocks and block_size != "shard":
            size = _round_up(size, int(block_size))
        return BlockLayout(numel, shards, size, bits, size if block_size == "shard" else int(block_size))

    def shard(self, index: int) -> BlockLayout:
        """The layout of one shard on its own: the same blocks, for its owner to send."""
        left = self.numel - index * self.shard_size
        return replace(self, numel=min(max(left, 0), self.shard_size), shards=1)

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
        """[B] of any float dtype -> fp32 [N, blocks, b], short shards and blocks filled with zeros."""
        whole = F.pad(flat.to(torch.float32), (0, self.shards * self.shard_size - flat.numel()))
        missing = self.blocks * self.block - self.shard_size
        return F.pad(whole.view(self.shards, -1), (0, missing)).view(self.shards, self.blocks, self.block)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, blocks, b] -> [n, S], without the fill of blocks."""
        return blocks.reshape(blocks.shape[0], -1)[:, : self.shard_size]

    def flat(self, blocks: torch.Tensor) -> torch.Tensor:
        """[N, blocks, b] -> [B], without any fill: the inverse of `cut`."""
        return self.join(blocks).reshape(-1)[: self.numel]

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Number of real elements of each block, int64 [N, blocks]; 0 in an empty one."""
        in_shard = torch.arange(self.blocks, device=device) * self.block
        start = torch.arange(self.shards, device=device)[:, None] * self.shard_size + in_shard
        full = (self.shard_size - in_shard).clamp(max=self.block)
        return torch.minimum(self.numel - start, full).clamp(min=0)
