"""The owner's end of an exchange: payloads to sums, by a fused kernel where one serves, else by loco.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_patch import loco
from megatron_patch.quantization.backends import fused
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum N senders' payloads of the one shard of `layout` (loco.decompress_reduce)."""
    _decompress_reduce(payloads, codec, layout, output, divisor)
    if layout.exact is not None:
        layout.exact.read(payloads[:, None], layout.coded_bytes, output, divisor)


def decompress(payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor) -> None:
    """Decode one payload for each shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    coded = replace(layout, exact=None)
    kernels = fused(codec, coded, output.device)
    if kernels is not None and hasattr(kernels, "decompress"):  # in one launch
        kernels.decompress(payloads, codec, coded, output)
    else:
        loco.decompress(payloads, codec, coded, output, (kernels or loco).decompress_reduce)
    if layout.exact is not None:
        layout.exact.read(payloads[None], layout.coded_bytes, output)


def _decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int
) -> None:
    run = fused(codec, layout, output.device) or loco
    run.decompress_reduce(payloads, codec, layout, output, divisor)
