"""Writes codes and scales into a payload, and reads them, at the positions that layout.py computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_patch.quantization.blocks import word_bytes
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import BF16_NAN, pack, unpack


def write_payload(
    codes: torch.Tensor, scales: torch.Tensor, layout: BlockLayout, payload: torch.Tensor
) -> None:
    """Write codes, int8 [n, blocks, b], and scales, fp32 [n, blocks], into uint8 [n, layout.coded_bytes].

    A code's lowest `layout.bits` bits are written. Every byte of the payload is written.
    """
    _write_codes(codes, layout, payload)
    end = layout.code_bytes + 2 * layout.blocks
    stored = scales.to(torch.bfloat16).view(torch.int16)
    stored.masked_fill_(torch.isnan(scales), BF16_NAN)  # The bit pattern that torch gives a NaN varies.
    payload[:, layout.code_bytes : end] = stored.view(torch.uint8)
    payload[:, end:] = 0


def read_payload(payload: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Read (codes, int8 [n, blocks, b]; scales, fp32 [n, blocks]) from uint8 [n, payload_bytes].

    Codes are unsigned numbers of `layout.bits` bits; 8 bits wrap to int8.
    """
    raw = payload[:, layout.code_bytes : layout.code_bytes + 2 * layout.blocks].contiguous()
    scales = raw.view(torch.bfloat16).to(torch.float32)
    return _read_codes(payload, layout), scales


def _write_codes(codes: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> None:
    n, (places, end) = codes.shape[0], _places(layout, payload.device)
    lengths = layout.lengths(payload.device)[..., None]
    codes = codes.masked_fill(torch.arange(layout.block, device=payload.device) >= lengths, 0)
    packed = pack(codes.view(-1, layout.block), layout.bits).view(n, -1)
    room = payload.new_zeros(n, end + 1)
    room.scatter_(1, places.expand(n, -1), packed)
    payload[:, :end] = room[:, :end]
    payload[:, end : layout.code_bytes] = 0


def _read_codes(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    n, shape = payload.shape[0], (payload.shape[0], layout.blocks, layout.block)
    places, end = _places(layout, payload.device)
    packed = F.pad(payload[:, :end], (0, 1)).gather(1, places.expand(n, -1))
    return unpack(packed.view(-1, layout.block * layout.bits // 8), layout.bits, layout.block).view(shape)


def _places(layout: BlockLayout, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the position of each byte of each shard's codes, int64 [N, blocks*b*p/8], and the codes' end."""
    places = layout.table.code_bytes(layout.block, layout.bits, device).view(layout.shards, -1)
    return places, layout.table.words * word_bytes(layout.block, layout.bits)
