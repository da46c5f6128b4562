"""Codes and scales <-> the bytes of a payload, whose places layout.py tells."""

from __future__ import annotations

import torch

from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import pack, unpack
from megatron_patch.quantization.scales import BF16_NAN


def write_payload(
    codes: torch.Tensor, scales: torch.Tensor, layout: BlockLayout, payload: torch.Tensor
) -> None:
    """Write codes, int8 [n, blocks, b], and scales, fp32 [n, blocks], into `payload`, uint8 [n,
    payload_bytes].

    Of a code its lowest `layout.bits` bits; every byte of the payload is written.
    """
    packed = pack(layout.join(codes), layout.bits)
    end = layout.code_bytes + 2 * layout.blocks
    payload[:, : packed.shape[1]] = packed
    payload[:, packed.shape[1] : layout.code_bytes] = 0
    stored = scales.to(torch.bfloat16).view(torch.int16)
    stored.masked_fill_(torch.isnan(scales), BF16_NAN)  # which of its bit patterns torch writes varies
    payload[:, layout.code_bytes : end] = stored.view(torch.uint8)
    payload[:, end:] = 0


def read_payload(payload: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, payload_bytes] -> (codes as they were packed, int8 [n, blocks, b]; scales, fp32 [n, blocks]).

    Codes are the whole numbers of their bits, without a sign; 8 bits wrap to int8.
    """
    n = payload.shape[0]
    packed = payload[:, : -(-layout.shard_size * layout.bits // 8)]
    codes = torch.zeros(n, layout.blocks * layout.block, dtype=torch.int8, device=payload.device)
    codes[:, : layout.shard_size] = unpack(packed, layout.bits, layout.shard_size)
    raw = payload[:, layout.code_bytes : layout.code_bytes + 2 * layout.blocks].contiguous()
    scales = raw.view(torch.bfloat16).to(torch.float32)
    return codes.view(n, layout.blocks, layout.block), scales
