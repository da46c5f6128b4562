"""The CPU kernels of weights/code.py, with the same functions; they give the same bytes."""

from __future__ import annotations

import torch

from megatron_patch.quantization import native
from megatron_patch.weights.code import Mismatch, decode_each, kind_of


def encode(
    old: torch.Tensor, new: torch.Tensor, fp16: bool, message: torch.Tensor, facts: torch.Tensor
) -> int:
    run = native.loaded().megatron_loco_weight_encode
    before, after, to, told = map(native.pointer, (old, new, message, facts))
    return int(run(native.variant(), before, after, old.numel(), fp16, to, told))


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, verdicts: torch.Tensor
) -> None:
    decode_each(_decode_one, messages, places, shards, own, verdicts)


def _decode_one(message: torch.Tensor, weights: torch.Tensor) -> int:
    try:
        kind_of(message, weights.numel())
    except Mismatch as mismatch:
        return mismatch.verdict
    run = native.loaded().megatron_loco_weight_decode
    message_at, weights_at = map(native.pointer, (message, weights))
    return int(run(native.variant(), message_at, message.numel(), weights_at, weights.numel()))


def sums(weights: torch.Tensor) -> torch.Tensor:
    totals = torch.empty(*weights.shape[:-1], 2, dtype=torch.int64, device="cpu")
    run = native.loaded().megatron_loco_weight_sums
    rows = weights if weights.dim() == 2 else weights[None]
    for row, of_row in zip(rows, totals.view(-1, 2), strict=True):
        run(native.variant(), native.pointer(row), row.numel(), native.pointer(of_row))
    return totals
