"""Rotation of a block before it is coded, so that it looks Gaussian whatever its distribution was.

    y = H (d * x)        x = d * (H y)

H is a Hadamard matrix of +-1, and d holds fixed signs divided by the square root of H's length. y has the
energy of x, and the largest numbers of x are spread over all of y. This is the randomized Hadamard transform
of QuIP# (arXiv 2402.04396) and SDP4Bit (arXiv 2410.15526). The signs are the same for all ranks, blocks and
steps, so that the owner of a shard adds up rotated blocks and rotates the sum back once.

If n is not a power of two, a block of n elements is rotated in parts whose lengths are the powers of two that
add up to n, the largest first: 96 = 64 + 32. So no energy leaves a block, and a block of zeros stays one.

H is applied in log2 of its length stages, neighbours first: stage j replaces the numbers a and b that are 2^j
apart by a + b and a - b. All arithmetic is fp32, in this order, so that all backends get the same bits. If a
gradient is above 2^120, the sums may leave fp32's range; such a block is not finite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megatron_patch.quantization.layout import BlockLayout


@dataclass(frozen=True)
class Rotation:
    """Whether the blocks that are coded, and their errors, are rotated; and who rotates them."""

    rotated: bool
    sender: bool
    """Whether the sender rotates the blocks; else it is given rotated ones, or none are rotated."""
    owner: bool
    """Whether the owner rotates the sum back."""

    def hop(self, first: bool = False, last: bool = False) -> Rotation:
        """Return the rotation for one hop: only the first hop rotates, and only the last rotates back."""
        return Rotation(self.rotated, self.rotated and first, self.rotated and last)


NONE = Rotation(False, False, False)
HADAMARD = Rotation(True, True, True)


@functools.cache
def signs(block: int) -> torch.Tensor:
    """Return the signs of d, fp32 [b] of +1 and -1: the top bit of Murmur's hash of an element's index."""
    hashed = torch.arange(block, dtype=torch.int64, device="cpu") * 0x9E3779B1 & 0xFFFFFFFF
    hashed ^= hashed >> 15
    hashed = hashed * 0x85EBCA6B & 0xFFFFFFFF
    hashed ^= hashed >> 13
    hashed = hashed * 0xC2B2AE35 & 0xFFFFFFFF
    return 1 - 2 * (hashed >> 31).to(torch.float32)


def rotate(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Rotate fp32 [n, blocks, b]; the fill of short blocks is unchanged.

    n is `layout.shards`; or `layout` has one shard, and n ranks have sent it.
    """
    parts = _parts(layout, blocks.device)
    return _hadamard(blocks * _diagonal(parts, layout.block), parts)


def rotate_back(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Undo `rotate`, up to fp32 rounding."""
    parts = _parts(layout, blocks.device)
    return _hadamard(blocks, parts) * _diagonal(parts, layout.block)


def _parts(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """Return log2 of the length of each element's part, int64 [N, blocks, b]; 0 in the fill."""
    place, length = torch.arange(layout.block, device=device), layout.lengths(device)[..., None]
    # The value of the highest bit in which place and length differ is the length of the place's part.
    exponent = (place ^ length).to(torch.float64).frexp().exponent.to(torch.int64) - 1
    return torch.where(place < length, exponent, 0)


def _diagonal(parts: torch.Tensor, block: int) -> torch.Tensor:
    scale = torch.exp2(-parts.to(torch.float64) / 2).to(torch.float32)
    return signs(block).to(parts.device) * torch.where(parts > 0, scale, 1.0)


def _hadamard(blocks: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    for stage in range((blocks.shape[-1] - 1).bit_length()):
        pairs = blocks.view(*blocks.shape[:-1], -1, 2, 1 << stage)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        added = torch.stack([a + b, a - b], dim=-2).view(blocks.shape)
        blocks = torch.where(parts > stage, added, blocks)
    return blocks
