"""What the tests of both codes of weights share: coders by name, bit patterns, memory that ends at a wall."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.quantization import native

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = "" if torch.cuda.is_available() and not INTERPRETED else "no GPU is there"
NO_INTERPRETER = "" if INTERPRETED else "TRITON_INTERPRET is 0"
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x3F80]
"""bf16's zeros, infinities, NaNs, smallest numbers and 1."""


@dataclass(frozen=True)
class Coder:
    """A coder, the device it works on, and by how much its tests are fewer than those of the others."""

    coder: Any
    device: str = "cpu"
    fewer: int = 1
    most: int = 1 << 22
    """Weights, where a test can do with so few."""
    without: str = ""
    """Why it cannot run here."""
    variant: int | None = None

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.variant is None else native.using(self.variant)


def parametrized(coders: Mapping[str, Coder], names: list[str]) -> pytest.MarkDecorator:
    """Runs a test with each of the named coders."""
    skipped = {
        name: pytest.mark.skipif(bool(coders[name].without), reason=coders[name].without) for name in names
    }
    return pytest.mark.parametrize("name", [pytest.param(name, marks=skipped[name]) for name in names])


def decode_one(coder: Any, message: torch.Tensor, weights: torch.Tensor, found: torch.Tensor) -> None:
    """One message, uint8 [bytes], of which the receiver owns nothing."""
    places = torch.tensor([[0, message.numel()]], device=message.device)
    coder.decode(message[None], places, weights[None], -1, found)


def as_bits(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([n - 0x10000 if n >= 0x8000 else n for n in numbers], dtype=torch.int16)


def patterns(bits: torch.Tensor) -> list[int]:
    return (bits.to(torch.int64) & 0xFFFF).tolist()


def before_a_wall(contents: torch.Tensor) -> torch.Tensor:
    """A copy of uint8 [n] or int16 [n], behind which is memory that a process dies of touching."""
    page, size = mmap.PAGESIZE, contents.numel() * contents.itemsize
    wall = -(-size // page) * page
    memory = mmap.mmap(-1, wall + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + wall
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), page, 0) == 0
    number = contents.numel()
    return torch.frombuffer(memory, dtype=contents.dtype, count=number, offset=wall - size).copy_(contents)


class Waiting(TorchDispatchMode):
    """Raises where the CPU would wait for a tensor's number."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))
