"""Codes of 8, 4, 2 or 1 bit, packed into bytes.

Element k of a byte's 8/p elements takes bits [k*p, (k+1)*p): the first element is in the lowest bits.
8, 4 and 2 bits are two's complement; at 1 bit a set bit is +1 and a clear one -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [n, S] -> uint8 [n, ceil(S*bits/8)]; elements missing from the last byte are 0 bits."""
    if bits == 8:
        return codes.view(torch.uint8)
    per_byte = 8 // bits
    raw = (codes > 0).to(torch.uint8) if bits == 1 else codes.view(torch.uint8) & ((1 << bits) - 1)
    raw = F.pad(raw, (0, -raw.shape[1] % per_byte)).view(raw.shape[0], -1, per_byte)
    packed = raw[..., 0].clone()
    for k in range(1, per_byte):
        packed |= raw[..., k] << (k * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """uint8 [n, ceil(size*bits/8)] -> int8 [n, size]; the inverse of `pack`."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)[:, :size]
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=packed.device) * bits
    raw = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    raw = raw.view(packed.shape[0], -1)[:, :size].view(torch.int8)
    if bits == 1:
        return raw * 2 - 1
    sign = 1 << (bits - 1)
    return (raw ^ sign) - sign
