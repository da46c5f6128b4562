"""What a codec is: it turns the numbers of blocks into a payload, and a payload into numbers.

A codec is one file that implements `Codec` and registers it (registry.py). The torch reference
(loco.py) serves any codec; the fused kernels serve the package's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import HADAMARD, NONE, Rotation
from megatron_patch.registry import CodecEntry, codecs


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

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Write h, fp32 [N, blocks, b], into `payload`, uint8 [N, payload_bytes], every byte of it.

        The fill of short blocks (`layout.lengths`) is 0 in h, and the codec's to keep out of scales and of
        what it returns.
        """
        ...

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """uint8 [n, payload_bytes] -> fp32 [n, blocks, b]; what fill decodes to is not defined."""
        ...


def codec_of(config: CompressionConfig, first: bool = True, last: bool = True) -> Codec:
    """The codec of `config.codec`, `bits` and `rotation`, for an exchange's first hop, its last, or both."""
    rotation = HADAMARD if config.rotates else NONE
    codec: Codec = codecs()[config.code].make(config.bits, rotation.hop(first, last))
    return codec


@functools.cache
def check_codec(entry: CodecEntry, bits: int, block_size: int | str, device: torch.device) -> None:
    """Compare what `encode` of a registered codec returns with what its `decode` reads. The error state is
    made of the former and the gradient of the latter: where they differ training goes wrong without a word.

    Raises:
        UserError: they differ; the message has the first number where they do.
    """
    codec, name = entry.make(bits, NONE), entry.name
    block = 64 if block_size == "shard" else int(block_size)
    numel = 9 * block
    for spans in None, [Span(0, numel, block + block // 2)]:
        layout = BlockLayout.of(numel, 2, bits, block_size, spans=spans)
        place = torch.arange(numel, dtype=torch.float32, device="cpu")
        h = layout.cut(place.sin() * torch.exp2(place // block - 4)).to(device)
        h[0, 0] = 0.0
        h[1, 0, 0], h[1, -1, 0] = torch.nan, torch.inf
        bad = ~h.isfinite().all(dim=-1)
        inside = torch.arange(layout.block, device=device) < layout.lengths(device)[..., None]
        payloads = [
            torch.full((2, layout.coded_bytes), byte, dtype=torch.uint8, device=device) for byte in (85, 170)
        ]
        sent, _ = [codec.encode(h.clone(), layout, payload) for payload in payloads]
        if not torch.equal(*payloads):
            raise UserError(f"codec {name!r}: encode does not write every byte of its payload")
        found = torch.cat([codec.decode(payloads[0][j : j + 1], layout.part(j)) for j in range(2)])
        said = torch.where(sent.finite[..., None], sent.values, torch.nan)
        said[bad] = torch.nan
        wrong = inside & (found != said) & ~(found.isnan() & said.isnan())
        if wrong.any() or sent.finite[bad].any():
            at = tuple((wrong if wrong.any() else inside & bad[..., None]).nonzero()[0].tolist())
            raise UserError(
                f"codec {name!r}: where a block has {h[at]:g}, encode returns {sent.values[at]:g} (finite: "
                f"{bool(sent.finite[at[:2]])}) and decode {found[at]:g}; both must give the same, and NaN in "
                "a block with a NaN or Inf (read_payload gives codes without a sign)"
            )
