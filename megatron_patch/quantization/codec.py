"""The interface of codecs: a codec turns the numbers of blocks into a payload, and a payload into numbers.

A codec is a class that implements `Codec` and is registered in registry.py. The torch reference (loco.py)
supports any codec; the fused kernels support the package's own.
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
    """s*q, fp32 [N, blocks, b]; 0 in the fill of short blocks, and in blocks that are not finite."""
    finite: torch.Tensor
    """bool [N, blocks]; False for a block with a NaN or Inf, which decodes to NaN."""


class Codec(Protocol):
    """Turns h into codes of `bits` bits and scales. A codec is stateless, and equal on all ranks."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        ...

    @property
    def bits(self) -> int:
        """The bits of one code, the same as those of the layout that the codec is used with."""
        ...

    @property
    def rotation(self) -> Rotation:
        """Whether the codec's blocks are rotated ones. The codec's caller rotates them, and rotates back the
        sum of what the senders sent."""
        ...

    def encode(self, h: torch.Tensor, layout: BlockLayout, payload: torch.Tensor) -> Encoded:
        """Encode h, fp32 [N, blocks, b], into every byte of `payload`, uint8 [N, layout.coded_bytes].

        The fill of short blocks (`layout.lengths`) is 0 in h. It must not affect the scales, and must be 0 in
        the result.
        """
        ...

    def decode(self, payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """Decode uint8 [n, payload_bytes] to fp32 [n, blocks, b]; the fill may decode to anything."""
        ...


def codec_of(config: CompressionConfig, first: bool = True, last: bool = True) -> Codec:
    """Create the codec that `config` names, for the first hop of an exchange, its last hop, or both."""
    rotation = HADAMARD if config.rotates else NONE
    codec: Codec = codecs()[config.code].make(config.bits, rotation.hop(first, last))
    return codec


@functools.cache
def check_codec(entry: CodecEntry, bits: int, block_size: int | str, device: torch.device) -> None:
    """Check that a registered codec's `decode` gives what its `encode` has returned.

    The error state is computed from the result of `encode`, and the gradient by `decode`: if they differed,
    training would go wrong silently.

    Raises:
        UserError: they differ; the message has the first number that does.
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
        decoded = torch.cat([codec.decode(payloads[0][j : j + 1], layout.part(j)) for j in range(2)])
        said = torch.where(sent.finite[..., None], sent.values, torch.nan)
        said[bad] = torch.nan
        wrong = inside & (decoded != said) & ~(decoded.isnan() & said.isnan())
        if wrong.any() or sent.finite[bad].any():
            at = tuple((wrong if wrong.any() else inside & bad[..., None]).nonzero()[0].tolist())
            raise UserError(
                f"codec {name!r}: where a block has {h[at]:g}, encode returns {sent.values[at]:g} (finite: "
                f"{bool(sent.finite[at[:2]])}) and decode {decoded[at]:g}; both must give the same, and NaN "
                "in a block with a NaN or Inf (read_payload gives codes without a sign)"
            )
