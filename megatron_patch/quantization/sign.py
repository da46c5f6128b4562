"""The sign codec, 1 bit: a block's signs, and the mean of its magnitudes.

    s = mean|h| rounded UP to bf16,  q = +1 where h >= 0, else -1

The code of 1-bit Adam (arXiv 2102.02888, section 4). The mean is of the real elements of a block, summed in
fp64, so that its order does not matter and 1e38 does not overflow. There is no code for zero: a block of
zeros has s = 0, but a zero beside other numbers decodes to +s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_patch.quantization.codec import Encoded
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import block_scales
from megatron_patch.quantization.payload import read_payload, write_payload
from megatron_patch.quantization.rotation import NONE, Rotation
from megatron_patch.quantization.uniform import dequantize


@dataclass(frozen=True)
class Sign:
    """One bit: set for +1, clear for -1."""

    bits: int = 1
    rotation: Rotation = NONE
    name = "sign"

    def scales(self, h: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """fp32 [n, blocks, b] -> fp32 [n, blocks], bf16 values; NaN for a non-finite block."""
        total = h.abs().sum(dim=-1, dtype=torch.float64)
        mean = (total / layout.lengths(h.device).clamp(min=1)).to(torch.float32)
        return block_scales(mean, h.abs().amax(dim=-1), 1)

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Codec.encode. The fill of short blocks is sent as +1."""
        scales = self.scales(h, layout)
        codes = torch.where(h >= 0, 1, -1).to(torch.int8)
        write_payload((codes > 0).to(torch.int8), scales, layout, payload)
        finite = torch.isfinite(scales)
        sent = dequantize(codes, torch.where(finite, scales, 0.0))
        return Encoded(layout.cut(layout.flat(sent)), finite)  # nothing was lost of fill

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """Codec.decode."""
        raw, scales = read_payload(payload, layout)
        return dequantize(raw * 2 - 1, scales)
