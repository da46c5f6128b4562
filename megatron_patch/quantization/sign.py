"""The sign codec, 1 bit: the signs of a block's elements, and the mean of their magnitudes.

    s = mean|h| rounded UP to bf16,  q = +1 where h >= 0, else -1

It is the code of 1-bit Adam (arXiv 2102.02888, section 4). The mean is taken without fill and summed in fp64,
so that the order does not matter and 1e38 does not overflow. There is no code for zero: a block of zeros has
s = 0, but a zero beside other numbers decodes to +s.
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
    """The sign codec; the bit is 1 for +1, and 0 for -1."""

    bits: int = 1
    rotation: Rotation = NONE
    name = "sign"

    def scales(self, h: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """Compute s: fp32 [n, blocks, b] -> fp32 [n, blocks], exact in bf16; NaN for a non-finite block."""
        total = h.abs().sum(dim=-1, dtype=torch.float64)
        mean = (total / layout.lengths(h.device).clamp(min=1)).to(torch.float32)
        return block_scales(mean, h.abs().amax(dim=-1), 1)

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Codec.encode; fill is 0 in the result, whatever it decodes to."""
        scales = self.scales(h, layout)
        codes = torch.where(h >= 0, 1, -1).to(torch.int8)
        write_payload((codes > 0).to(torch.int8), scales, layout, payload)
        finite = torch.isfinite(scales)
        sent = dequantize(codes, torch.where(finite, scales, 0.0))
        return Encoded(layout.cut(layout.flat(sent)), finite)  # `cut` sets the fill to 0.

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        raw, scales = read_payload(payload, layout)
        return dequantize(raw * 2 - 1, scales)
