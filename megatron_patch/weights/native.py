"""The CPU kernels of weights/code.py and entropy_code.py: the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_patch.quantization import native
from megatron_patch.weights import entropy_code
from megatron_patch.weights.code import Mismatch, decode_each, read_header


def encode(old: torch.Tensor, new: torch.Tensor, message: torch.Tensor) -> int:
    """weight_code.encode."""
    run = native.loaded().megatron_loco_weight_encode
    before, after, to = map(native.pointer, (old, new, message))
    return int(run(native.variant(), before, after, old.numel(), to))


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, found: torch.Tensor
) -> None:
    """weight_code.decode."""
    decode_each(_decode_one, messages, places, shards, own, found)


def _decoding(check: Callable[[torch.Tensor, int], object], name: str) -> Callable[..., int]:
    """Decode one message by the library's function `name`, once `check` has read its header."""

    def decode_one(message: torch.Tensor, weights: torch.Tensor) -> int:
        try:
            check(message, weights.numel())
        except Mismatch as mismatch:
            return mismatch.found
        run = getattr(native.loaded(), name)
        message_at, weights_at = map(native.pointer, (message, weights))
        return int(run(native.variant(), message_at, message.numel(), weights_at, weights.numel()))

    return decode_one


_decode_one = _decoding(read_header, "megatron_loco_weight_decode")
_decode_one_entropy = _decoding(entropy_code.kind_of, "megatron_loco_entropy_decode")


def encode_entropy(
    old: torch.Tensor, new: torch.Tensor, fp16: bool, message: torch.Tensor, facts: torch.Tensor
) -> int:
    """entropy_code.encode."""
    run = native.loaded().megatron_loco_entropy_encode
    before, after, to, told = map(native.pointer, (old, new, message, facts))
    return int(run(native.variant(), before, after, old.numel(), fp16, to, told))


def decode_entropy(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, found: torch.Tensor
) -> None:
    """entropy_code.decode."""
    decode_each(_decode_one_entropy, messages, places, shards, own, found)


def sums(weights: torch.Tensor) -> torch.Tensor:
    """weight_code.sums."""
    found = torch.empty(*weights.shape[:-1], 2, dtype=torch.int64, device="cpu")
    run = native.loaded().megatron_loco_weight_sums
    rows = weights if weights.dim() == 2 else weights[None]
    for row, of_row in zip(rows, found.view(-1, 2), strict=True):
        run(native.variant(), native.pointer(row), row.numel(), native.pointer(of_row))
    return found
