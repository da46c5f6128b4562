"""Two checksums of a shard's weights, which compare the ranks' copies and check messages.

A sum adds up one number for each tile t, modulo 2^64, so that the tiles' order does not matter. A tile of
weights x is 1,024 words w_j = x_2j + 2^16 * x_(2j+1), zeros after the last weight; keys k_j have 32 bits:

    a    = sum over even j of (w_j + k_j mod 2^32) * (w_(j+1) + k_(j+1) mod 2^32)     (NH of UMAC, RFC 4418)
    sum  = sum over t of mix(a + (t + 1) * STEP)                                   mix: SplitMix64's finalizer

The second sum has each key's halves exchanged. Equal and opposite changes of weights would cancel in a plain
sum; in products they do not.
"""

from __future__ import annotations

import functools

import torch

TILE = 2048
"""The weights of a tile."""
STEP = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The steps of `mix`: a shift and a factor each."""


def tiles_of(numel: int) -> int:
    return -(-numel // TILE)


def sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the two sums of int16 [n], int64 [2]; or of each row of int16 [rows, n], int64 [rows, 2]."""
    with weights.device:
        rows = weights if weights.dim() == 2 else weights[None]
        words = torch.nn.functional.pad(rows.to(torch.int64) & 0xFFFF, (0, -rows.shape[1] % TILE))
        tiles = tiles_of(rows.shape[1])
        words = words.view(len(rows), tiles, TILE // 2, 2)
        words = words[..., 0] | words[..., 1] << 16
        keyed = (words[..., None, :] + keys().to(weights.device)) & 0xFFFFFFFF
        of_tiles = (keyed[..., 0::2] * keyed[..., 1::2]).sum(-1)
        return combined(of_tiles).view(*weights.shape[:-1], 2)


def combined(parts: torch.Tensor) -> torch.Tensor:
    """Combine two numbers for each of n tiles or shards, int64 [..., n, 2], into two sums [..., 2]."""
    place = torch.arange(1, parts.shape[-2] + 1, device=parts.device)[:, None]
    mixed = parts + place * _signed(STEP)
    for shift, factor in MIX:
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return mixed.sum(-2)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


@functools.cache
def keys() -> torch.Tensor:
    """Return the keys of a tile's words for both sums, int64 [2, TILE / 2] on CPU: Murmur's hash of j + 1."""
    key = torch.arange(1, TILE // 2 + 1, dtype=torch.int64, device="cpu") * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((15, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        key = (key ^ key >> shift) * factor & 0xFFFFFFFF
    return torch.stack([key, key >> 16 | key << 16 & 0xFFFFFFFF])
