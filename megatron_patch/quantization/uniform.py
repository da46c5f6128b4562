"""The uniform codec: whole multiples of a block's scale, which the block's largest magnitude sets (absmax).

It is LoCo's quantizer (arXiv 2407.04480) with a scale per block. For a block h of b elements and p bits:

    L = 2^(p-1) - 1,  s = max|h| / L rounded UP to bf16,  q = clamp(round(h / s), -L, L)

The code is symmetric: -2^(p-1) is never sent. Since s >= max|h| / L, |h - s*q| <= s/2. All arithmetic is
fp32; s*q is exact, since s has 8 significant bits and q at most 7. A block of zeros, or one whose scale
underflows, has s = 0 and decodes to 0; a block with a NaN or Inf has s = NaN and decodes to NaN, so that
the shard's owner sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_patch.quantization.codec import Encoded
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import block_scales, over
from megatron_patch.quantization.payload import read_payload, write_payload
from megatron_patch.quantization.rotation import NONE, Rotation


@dataclass(frozen=True)
class Uniform:
    """The uniform codec with 8, 4 or 2 `bits`; codes are in two's complement."""

    bits: int
    rotation: Rotation = NONE
    name = "uniform"

    @property
    def levels(self) -> int:
        """L, the largest code: 127, 7, 1 for 8, 4, 2 bits."""
        return int(2 ** (self.bits - 1)) - 1

    def scales(self, h: torch.Tensor) -> torch.Tensor:
        """Compute s: fp32 [n, blocks, b] -> fp32 [n, blocks], exact in bf16; NaN for a non-finite block."""
        largest = h.abs().amax(dim=-1)
        return block_scales(over(largest, self.levels), largest, self.levels)

    def quantize(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize fp32 [n, blocks, b] to (codes int8 [n, blocks, b], scales fp32 [n, blocks]).

        All codes of a block whose scale is 0 or NaN are 0.
        """
        scales = self.scales(h)
        usable = (scales > 0)[..., None]
        ratio = torch.where(usable, h, 0.0) / torch.where(usable, scales[..., None], 1.0)
        return ratio.round_().clamp_(-self.levels, self.levels).to(torch.int8), scales

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Codec.encode; fill is 0, and so are its codes."""
        codes, scales = self.quantize(h)
        write_payload(codes, scales, layout, payload)
        finite = torch.isfinite(scales)
        return Encoded(dequantize(codes, torch.where(finite, scales, 0.0)), finite)

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        raw, scales = read_payload(payload, layout)
        unused = 8 - self.bits
        return dequantize(raw << unused >> unused, scales)  # The shifts extend the code's sign to int8.


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return s*q, fp32 [n, blocks, b], of int8 [n, blocks, b] and fp32 [n, blocks]; NaN where s is NaN."""
    return codes.to(torch.float32) * scales[..., None]
