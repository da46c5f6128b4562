"""The two codes of a weight's change as the gather sees them: the planes (code.py), and the entropy code.

Both have kernels with the reference's bytes. `weight_coder` chooses those of a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from megatron_patch.config import AUTO
from megatron_patch.quantization import backends, native
from megatron_patch.weights import code as weight_code
from megatron_patch.weights import entropy_code
from megatron_patch.weights.code import KIND, NEW_SUMS, OLD_SUMS, STALE, UNCHANGED

FACTS = entropy_code.FACTS
"""What the sender learns of its own shard: how many weights did not change, and two sums of the old ones."""


class WeightCoder(Protocol):
    """A code of the changes of bf16 or fp16 weights, given as int16."""

    sums: Callable[[torch.Tensor], torch.Tensor]
    """weights/sums.py"""
    decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    """weights/code.py"""

    def bound(self, numel: int) -> int:
        """The most bytes that a message of `numel` weights has."""
        ...

    def encode(self, old: torch.Tensor, new: torch.Tensor, room: torch.Tensor, facts: torch.Tensor) -> int:
        """Write what makes `new` of `old`, int16 [n], into `room`, uint8 [bound(n)]; returns its bytes.

        Writes `facts`, int64 [FACTS], too.
        """
        ...

    def mark_if_stale(self, message: torch.Tensor, weights: torch.Tensor) -> None:
        """Mark a message, uint8, as STALE where `weights`, int16 [n], are not the new ones that it is of."""
        ...


class Planes:
    """weights/code.py"""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self.sums, self.decode = kernels.sums, kernels.decode

    def bound(self, numel: int) -> int:
        return weight_code.bound(numel)

    def encode(self, old: torch.Tensor, new: torch.Tensor, room: torch.Tensor, facts: torch.Tensor) -> int:
        size: int = self._kernels.encode(old, new, room)
        facts.copy_(_header(room)[UNCHANGED : OLD_SUMS.stop])
        return size

    def mark_if_stale(self, message: torch.Tensor, weights: torch.Tensor) -> None:
        header = _header(message)
        changed = (self.sums(weights) != header[NEW_SUMS]).any()
        header[KIND] = torch.where(changed, STALE, header[KIND])


class Entropy:
    """weights/entropy_code.py, of bf16 weights or of fp16 ones."""

    def __init__(self, kernels: ModuleType, fp16: bool) -> None:
        self._fp16 = fp16
        self._encode = kernels.encode if kernels is entropy_code else kernels.encode_entropy
        self.decode = kernels.decode if kernels is entropy_code else kernels.decode_entropy
        self.sums = kernels.sums

    def bound(self, numel: int) -> int:
        return entropy_code.bound(numel)

    def encode(self, old: torch.Tensor, new: torch.Tensor, room: torch.Tensor, facts: torch.Tensor) -> int:
        size: int = self._encode(old, new, self._fp16, room, facts)
        return size

    def mark_if_stale(self, message: torch.Tensor, weights: torch.Tensor) -> None:
        told = message[entropy_code.NEW_SUM].clone().view(torch.int64)
        message[0] = torch.where(self.sums(weights)[0] != told[0], STALE, message[0])


def chosen(weight_code: str, device: torch.device) -> str:
    """The name of the code that `CompressionConfig.weight_code` means on a device."""
    if weight_code != AUTO:
        return weight_code
    return "entropy" if device.type == "cpu" else "planes"


def weight_coder(name: str, device: torch.device, fp16: bool) -> WeightCoder:
    """The implementation of a code for a device.

    Args:
        fp16: whether the weights are fp16, not bf16.
    """
    kernels = backends.available(device)
    if kernels is None:
        return Planes(weight_code) if name == "planes" else Entropy(entropy_code, fp16)
    # Imported where it is used only: Triton takes a while.
    module = "native" if kernels is native else "triton_kernels"
    found = importlib.import_module(f"megatron_patch.weights.{module}")
    return Planes(found) if name == "planes" else Entropy(found, fp16)


def _header(message: torch.Tensor) -> torch.Tensor:
    return message[: weight_code.HEADER_BYTES].view(torch.int64)
