"""The CPU kernels of quantization/weight_code.py: the same bytes, in one pass for each direction."""

from __future__ import annotations

import torch

from megatron_patch.quantization import native
from megatron_patch.quantization.weight_code import Mismatch, read_header

_WEIGHTS_DIFFER = 1


def encode(old: torch.Tensor, new: torch.Tensor, message: torch.Tensor) -> int:
    """weight_code.encode."""
    run = native.loaded().megatron_loco_weight_encode
    before, after, to = map(native.pointer, (old, new, message))
    return int(run(native.variant(), before, after, old.numel(), to))


def decode(message: torch.Tensor, weights: torch.Tensor) -> None:
    """weight_code.decode."""
    read_header(message, weights.numel())
    run = native.loaded().megatron_loco_weight_decode
    message_at, weights_at = map(native.pointer, (message, weights))
    found = run(native.variant(), message_at, message.numel(), weights_at, weights.numel())
    if found == _WEIGHTS_DIFFER:
        raise Mismatch("the weights are not those that the sender had before its step")
    if found:
        raise Mismatch("the message has changed on its way: the new weights are not the sender's")
