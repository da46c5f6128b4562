"""The torch reference of compress: compensate, quantize, keep what was lost, for any codec.

    h = g + decode(e)      ->  payload, which decodes to s*q
    r = h - s*q            ->  e <- encode(beta*e + (1-beta)*r)

with the very s and q that are sent. Where the codec's blocks are rotated g is rotated first, and e is that of
rotated numbers. The fused kernels of quantization/ do the same in one pass, and must
give the same bits; this is the place to read them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_patch.compensation import error_state
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import rotate

STATISTICS = ("signal", "noise", "gradient", "error", "non_finite_blocks")
"""What `statistics` holds: sums of h^2, r^2, g^2, decode(e)^2 over finite blocks, and a count; fp64 [5]."""


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
    statistics: torch.Tensor | None,
) -> None:
    """quantization.native.compress, where the arguments are described, for any codec on any device."""
    g = layout.cut(gradient)
    if codec.rotation.sender:
        g = rotate(g, layout)
    e = error_state.load(error, layout) if error else None
    h = g if e is None else g + e
    rows = payload.new_empty(layout.shards, layout.coded_bytes)
    sent = codec.encode(h, layout, rows, noise)
    for row, start in zip(rows, layout.payload_starts.tolist()[:-1], strict=True):
        payload.view(-1)[start : start + layout.coded_bytes] = row
    lost = torch.where(sent.finite[..., None], h - sent.values, 0.0)
    if e is not None:
        # Two products and a sum, each rounded: no fused multiply-add, which kernels would have to mimic.
        average = lost if beta == 0 else e * beta + lost * (1 - beta)
        error_state.store(error, layout, average, keep=~sent.finite)
    if statistics is not None:
        statistics.copy_(_statistics(g, e, h, lost, sent.finite))


def _statistics(
    g: torch.Tensor, e: torch.Tensor | None, h: torch.Tensor, lost: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    def energy(x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(torch.where(finite[..., None], x, 0.0), dtype=torch.float64)
        return norm * norm

    of_error = torch.zeros((), dtype=torch.float64, device=g.device) if e is None else energy(e)
    return torch.stack([energy(h), energy(lost), energy(g), of_error, (~finite).sum().to(torch.float64)])
