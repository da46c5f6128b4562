"""What a codec is: it turns the numbers of blocks into a payload, and a payload into numbers.

A codec is one file that implements `Codec` and registers it (registry.py). The torch reference
(compensation/compress.py, decompress_reduce.py) serves any codec; the fused kernels serve the package's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import HADAMARD, NONE, Rotation
from megatron_patch.registry import codecs


@dataclass(frozen=True)
class Encoded:
    """What the receivers of a payload will decode."""

    values: torch.Tensor
    """fp32 [N, blocks, b]; 0 in the fill of short blocks, and in blocks that are not finite."""
    finite: torch.Tensor
    """bool [N, blocks]: whether a block was sent; one with a NaN or Inf decodes to NaN."""


class Codec(Protocol):
    """How h becomes codes of `bits` bits and scales; stateless, and equal on all ranks."""

    @property
    def name(self) -> str:
        """The family of codes; with `bits`, what tells one codec from another."""
        ...

    @property
    def bits(self) -> int:
        """Bits of one code: those of the layout that it is used with."""
        ...

    @property
    def rotation(self) -> Rotation:
        """Whether the blocks that it codes are rotated ones. It is not the codec that rotates them, but who
        uses it: a sum of what was sent is rotated back once."""
        ...

    def encode(
        self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor, noise: torch.Tensor | None = None
    ) -> Encoded:
        """Write h, fp32 [N, blocks, b], into `payload`, uint8 [N, payload_bytes], every byte of it.

        `noise`, fp32 [N, blocks, b] in [0, 1), asks for stochastic rounding. The fill of short blocks
        (`layout.lengths`) is 0 in h, and the codec's to keep out of scales and of what it returns.
        """
        ...

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """uint8 [n, payload_bytes] -> fp32 [n, blocks, b]; what fill decodes to is not defined."""
        ...


def codec_of(config: CompressionConfig, first: bool = True, last: bool = True) -> Codec:
    """The codec of `config.codec`, `bits` and `rotation`, for a hop that may be the first or the last of
    some."""
    rotation = HADAMARD if config.rotates else NONE
    codec: Codec = codecs()[config.code].make(config.bits, rotation.hop(first, last))
    return codec
