"""Codes of 1 to 8 bits, packed into bytes.

Where p divides 8, 8/p codes share a byte, the first in its lowest bits. Codes of other widths are packed as
several planes of such, one behind the other: of 3 bits the lower two of all codes, then the highest of all.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


@functools.cache
def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(lowest bit, width) of the planes of codes of `bits` bits: ((0, 2), (2, 1)) for 3."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))


def packed_bytes(size: int, bits: int) -> int:
    """Bytes that `size` codes take."""
    return sum(-(-size * width // 8) for _, width in planes(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest `bits` bits of int8 [n, S] -> uint8 [n, packed_bytes(S, bits)]; zeros fill a plane's last
    byte."""
    raw = codes.view(torch.uint8)
    return torch.cat([_pack(raw >> low, width) for low, width in planes(bits)], dim=1)


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """uint8 [n, packed_bytes(size, bits)] -> int8 [n, size], numbers from 0 on; 8 bits wrap to int8."""
    parts = packed.split([-(-size * width // 8) for _, width in planes(bits)], dim=1)
    codes = torch.zeros(packed.shape[0], size, dtype=torch.uint8, device=packed.device)
    for (low, width), part in zip(planes(bits), parts, strict=True):
        codes |= _unpack(part, width, size) << low
    return codes.view(torch.int8)


def _pack(raw: torch.Tensor, width: int) -> torch.Tensor:
    if width == 8:
        return raw
    count = 8 // width
    raw = F.pad(raw & ((1 << width) - 1), (0, -raw.shape[1] % count)).view(raw.shape[0], -1, count)
    packed = raw[..., 0].clone()
    for k in range(1, count):
        packed |= raw[..., k] << (k * width)
    return packed


def _unpack(packed: torch.Tensor, width: int, size: int) -> torch.Tensor:
    if width == 8:
        return packed
    shifts = torch.arange(8 // width, dtype=torch.uint8, device=packed.device) * width
    raw = (packed[..., None] >> shifts) & ((1 << width) - 1)
    return raw.view(packed.shape[0], -1)[:, :size]
