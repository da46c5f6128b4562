"""Codes of 1 to 8 bits, packed into bytes.

The bits of a row form one stream: element k takes bits [k*p, (k+1)*p), bit 0 being the lowest of the first
byte. So 8/p codes share a byte where p divides 8, the first in the lowest bits, and 8 codes share p bytes
elsewhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def _group(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the shortest run of codes that fills whole bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest `bits` bits of int8 [n, S] -> uint8 [n, ceil(S*bits/8)]; zeros fill the last byte."""
    if bits == 8:
        return codes.view(torch.uint8)
    count, nbytes = _group(bits)
    word = torch.uint8 if nbytes == 1 else torch.int64
    raw = codes.view(torch.uint8) & ((1 << bits) - 1)
    raw = F.pad(raw, (0, -raw.shape[1] % count)).view(raw.shape[0], -1, count).to(word)
    packed = raw[..., 0].clone()
    for k in range(1, count):
        packed |= raw[..., k] << (k * bits)
    if nbytes == 1:
        return packed
    split = torch.stack([packed >> (8 * k) & 0xFF for k in range(nbytes)], dim=-1).to(torch.uint8)
    return split.view(codes.shape[0], -1)[:, : -(-codes.shape[1] * bits // 8)]


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """uint8 [n, ceil(size*bits/8)] -> int8 [n, size], numbers from 0 on; 8 bits wrap to int8."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)[:, :size]
    count, nbytes = _group(bits)
    words = packed
    if nbytes > 1:
        split = F.pad(packed, (0, -packed.shape[1] % nbytes)).view(packed.shape[0], -1, nbytes).long()
        words = split[..., 0].clone()
        for k in range(1, nbytes):
            words |= split[..., k] << (8 * k)
    shifts = torch.arange(count, dtype=words.dtype, device=packed.device) * bits
    raw = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return raw.view(packed.shape[0], -1)[:, :size].to(torch.int8)
