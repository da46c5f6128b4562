"""The levels codec: 2^p levels, close where numbers are dense, and a scale that a block's energy sets.

    s = c * rms(h) rounded UP to bf16,   q = the level nearest to h / s,   h decodes to s*q

The levels are whole numbers in the proportions of the Lloyd-Max quantizer of a Gaussian (Max, IRE Trans.
Inf. Theory 6, 1960), which lose at most 0.25 % more than it. Of a Gaussian block 0.95, 3.5 and 11.7 % of
the energy are lost with 4, 3 and 2 bits. A rotated block looks Gaussian whatever it was (rotation.py); of
others, those with heavy tails above all, more is lost.

No level is zero: where one number of a block is not, none is sent as such. A block of zeros has s = 0.

The code is a sign, its highest bit (1: negative), and a level's number. A number in the middle of two
levels gets the smaller magnitude; s*q and the middles times s are exact in fp32. rms(h) is that of whole
numbers, so that any order of their sum gives the same bits:

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

LEVELS = {
    4: (3, 9, 15, 21, 28, 36, 46, 61),
    3: (3, 9, 16, 26),
    2: (3, 10),
}
"""The positive levels of each number of bits."""
STEPS = {4: 0.0448032, 3: 0.0830666, 2: 0.151035}
"""c: what 1 of a level is worth where rms(h) is 1; the least loss of a Gaussian."""
_WHOLE = 64.0


@dataclass(frozen=True)
class Levels:
    """`bits` bits, 2 to 4."""

    bits: int
    rotation: Rotation = NONE
    name = "levels"

    @property
    def largest(self) -> int:
        """The largest level."""
        return LEVELS[self.bits][-1]

    def scales(self, h: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """fp32 [n, blocks, b] -> fp32 [n, blocks], bf16 values; NaN for a non-finite block."""
        largest = h.abs().amax(dim=-1)
        unit, inverse = normalizing(largest)
        whole = (torch.where(torch.isfinite(h), h, 0.0) * unit[..., None] * _WHOLE).round_()
        energy = whole.square_().sum(dim=-1, dtype=torch.float64)
        mean = (energy / layout.lengths(h.device).clamp(min=1)).to(torch.float32)
        step = torch.tensor(STEPS[self.bits] / _WHOLE, dtype=torch.float32, device=h.device)
        # In fp64 and rounded once: torch's fp32 root may be one ulp off on CPUs (MKL), the kernels' is not.
        root = mean.to(torch.float64).sqrt().to(torch.float32)
        return block_scales(root * step * inverse, largest, self.largest)

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Codec.encode. The fill of short blocks is sent as 0."""
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
        """Codec.decode."""
        code, scales = read_payload(payload, layout)
        return dequantize(self._levels(code), scales)

    def _levels(self, code: torch.Tensor) -> torch.Tensor:
        """The whole numbers q of codes, int8 of any shape."""
        positive = torch.tensor(LEVELS[self.bits], dtype=torch.int8, device=code.device)
        return torch.cat([positive, -positive])[code.long()]
