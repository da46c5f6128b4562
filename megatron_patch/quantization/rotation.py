"""Rotating a block before it is coded, so that whatever its distribution was, it looks Gaussian.

    y = H (d * x)        x = d * (H y)

H is a Hadamard matrix of +-1, d holds fixed signs over the square root of H's length: y has x's energy, and
the largest numbers of x are spread over all of y. The randomized Hadamard transform of QuIP# (arXiv
2402.04396) and SDP4Bit (arXiv 2410.15526), whose signs here are the same for all ranks, blocks and steps:
the owner of a shard adds what it was sent as it is, and rotates the sum back once.

A block of n elements, n not a power of two, is rotated in parts whose lengths are the powers of two that n is
made of, the largest first: 96 = 64 + 32. So no energy leaves a block, and a block of zeros stays one.

H is applied in log2 of its length stages, neighbours first: stage j puts a + b and a - b for the numbers a
and b that are 2^j apart. All arithmetic is fp32, in that order, and so all backends get the same bits. The
sums pass fp32's range where a gradient passes 2^120: such a block is not finite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megatron_patch.quantization.layout import BlockLayout


@dataclass(frozen=True)
class Rotation:
    """Whether what is coded, and the errors of it, are rotated blocks; and who rotates them."""

    rotated: bool
    sender: bool
    """The sender rotates its tensor before it codes it; else it is given a rotated one."""
    owner: bool
    """The owner rotates the sum of what was sent back; else it is handed on as it is."""

    def hop(self, first: bool = False, last: bool = False) -> Rotation:
        """The same for one level of a hierarchical exchange, between whose levels sums stay rotated."""
        return Rotation(self.rotated, self.rotated and first, self.rotated and last)


NONE = Rotation(False, False, False)
HADAMARD = Rotation(True, True, True)


@functools.cache
def signs(block: int) -> torch.Tensor:
    """The signs of d for a block's elements, fp32 [b] of +1 and -1 (Murmur's hash of the place, its top
    bit)."""
    hashed = torch.arange(block, dtype=torch.int64, device="cpu") * 0x9E3779B1 & 0xFFFFFFFF
    hashed ^= hashed >> 15
    hashed = hashed * 0x85EBCA6B & 0xFFFFFFFF
    hashed ^= hashed >> 13
    hashed = hashed * 0xC2B2AE35 & 0xFFFFFFFF
    return 1 - 2 * (hashed >> 31).to(torch.float32)


def rotate(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """fp32 [n, blocks, b] -> the same shape; what is behind a block's length stays as it is.

    n is N, or what was sent by n ranks of the one shard of `layout`.
    """
    parts = _parts(layout, blocks.device)
    return _hadamard(blocks * _diagonal(parts, layout.block), parts)


def rotate_back(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """The inverse of `rotate`, but for fp32's roundings."""
    parts = _parts(layout, blocks.device)
    return _hadamard(blocks, parts) * _diagonal(parts, layout.block)


def _parts(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """log2 of the length of each element's part, int64 [N, blocks, b]; 0 behind a block's length."""
    place, length = torch.arange(layout.block, device=device), layout.lengths(device)[..., None]
    # The highest bit in which n has a 1 and the place a 0 is the part's: those above it are its beginning.
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
