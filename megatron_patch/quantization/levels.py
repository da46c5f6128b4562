"""The levels codec: 2^p levels that are closest where numbers are dense, and a scale from a block's energy.

    s = c * rms(h) rounded UP to bf16,   q = the level nearest to h / s,   h decodes to s*q

The levels are whole numbers in the proportions of the Lloyd-Max quantizer of a Gaussian (Max, IRE Trans.
Inf. Theory 6, 1960), and lose at most 0.25 % more than it. With 4 and 2 bits a Gaussian block loses 0.95 and
11.7 % of its energy. A rotated block looks Gaussian whatever it was (rotation.py); other blocks,
above all those with heavy tails, lose more.

No level is zero: a zero in a block that is not all zeros is sent as the smallest level. A block of zeros has
s = 0.

A code is a sign in the highest bit (1: negative) and the number of a level. A number in the middle of two
levels gets the smaller one; s*q and s times the middles are exact in fp32. rms(h) is computed from whole
numbers, so that their sum has the same bits in any order:

    v = round_half_even(64 * u * |h|)   with u the power of two for which 1 <= u * max|h| < 2
    rms = sqrt(sum of v^2 / n) / (64 * u)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megatron_patch.quantization.codec import Encoded
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import block_scales, normalizing
from megatron_patch.quantization.payload import read_payload, write_payload
from megatron_patch.quantization.rotation import NONE, Rotation
from megatron_patch.quantization.uniform import dequantize

LEVELS = {4: (3, 9, 15, 21, 28, 36, 46, 61), 2: (3, 10)}
"""The positive levels by bits."""
STEPS = {4: 0.0448032, 2: 0.151035}
"""The factor c by bits: it loses least of a Gaussian."""
_WHOLE = 64.0


@dataclass(frozen=True)
class Levels:
    """The levels codec with 4 or 2 `bits`."""

    bits: int
    rotation: Rotation = NONE
    name = "levels"

    @property
    def largest(self) -> int:
        return LEVELS[self.bits][-1]

    def scales(self, h: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """Compute s: fp32 [n, blocks, b] -> fp32 [n, blocks], exact in bf16; NaN for a non-finite block."""
        largest = h.abs().amax(dim=-1)
        unit, inverse = normalizing(largest)
        whole = (torch.where(torch.isfinite(h), h, 0.0) * unit[..., None] * _WHOLE).round_()
        energy = whole.square_().sum(dim=-1, dtype=torch.float64)
        mean = (energy / layout.lengths(h.device).clamp(min=1)).to(torch.float32)
        step = torch.tensor(STEPS[self.bits] / _WHOLE, dtype=torch.float32, device=h.device)
        # The root is taken in fp64 and rounded once, as the kernels' is: torch's fp32 root may be off by one
        # ulp on CPUs (MKL).
        root = mean.to(torch.float64).sqrt().to(torch.float32)
        return block_scales(root * step * inverse, largest, self.largest)

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Codec.encode; the codes of fill are 0."""
        scales = self.scales(h, layout)
        finite = torch.isfinite(scales)
        used = torch.where(finite, scales, 0.0)
        level = LEVELS[self.bits]
        magnitude, code = h.abs(), torch.zeros(h.shape, dtype=torch.int8, device=h.device)
        for low, high in itertools.pairwise(level):
            code += magnitude > (used * ((low + high) / 2))[..., None]
        code |= (h < 0).to(torch.int8) << (self.bits - 1)
        code.masked_fill_((used == 0)[..., None], 0)
        write_payload(code, scales, layout, payload)
        place, length = torch.arange(layout.block, device=h.device), layout.lengths(h.device)[..., None]
        return Encoded(torch.where(place < length, dequantize(self._levels(code), used), 0.0), finite)

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        code, scales = read_payload(payload, layout)
        return dequantize(self._levels(code), scales)

    def _levels(self, code: torch.Tensor) -> torch.Tensor:
        """Return the levels q of codes, int8 of any shape."""
        positive = torch.tensor(LEVELS[self.bits], dtype=torch.int8, device=code.device)
        return torch.cat([positive, -positive])[code.long()]
