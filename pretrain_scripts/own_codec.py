"""A codec in a file of your own: blocks of FP8 numbers (E4M3), each with a scale.

Import it before the options are made: CompressionConfig(codec="fp8"), or --compression-codec fp8.
"""

from dataclasses import dataclass

import torch

import megatron_patch
from megatron_patch.quantization.codec import Encoded
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.payload import read_payload, write_payload
from megatron_patch.quantization.rotation import Rotation

LARGEST = 448.0  # of E4M3


@megatron_patch.register_codec("fp8", bits=[8])
@dataclass(frozen=True)
class Float8:
    bits: int
    rotation: Rotation

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        scales = (h.abs().amax(dim=-1) / LARGEST).to(torch.bfloat16).to(torch.float32)
        finite = torch.isfinite(scales)
        divisors = torch.where(finite & (scales > 0), scales, 1.0)[..., None]
        codes = (torch.where(finite[..., None], h, 0.0) / divisors).to(torch.float8_e4m3fn)
        write_payload(codes.view(torch.int8), scales, layout, payload)
        return Encoded(codes.float() * torch.where(finite, scales, 0.0)[..., None], finite)

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        codes, scales = read_payload(payload, layout)
        return codes.view(torch.float8_e4m3fn).float() * scales[..., None]
