"""The coders of the weight code by name, weights for their tests, and memory that ends at a wall."""

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
from simulation import weight_coder as by_hand
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.quantization import native
from megatron_patch.weights import code
from megatron_patch.weights import native as native_weights
from megatron_patch.weights import triton_kernels as triton_weights
from megatron_patch.weights.code import FACTS, bound

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


CODERS = {
    "reference": Coder(code, fewer=8),
    **{name: Coder(native_weights, variant=index) for index, name in enumerate(native.variants())},
    "triton-interpreted": Coder(triton_weights, fewer=100, most=300, without=NO_INTERPRETER),
    "triton-gpu": Coder(triton_weights, "cuda", without=GPU),
}
every_coder = parametrized(CODERS, [*CODERS])
cpu_coders = parametrized(CODERS, [name for name in CODERS if CODERS[name].device == "cpu"])
triton_coders = parametrized(CODERS, [name for name in CODERS if name.startswith("triton")])


def coded(name: str, old: torch.Tensor, new: torch.Tensor, fp16: bool = False) -> torch.Tensor:
    return coded_with_facts(name, old, new, fp16)[0]


def coded_with_facts(
    name: str, old: torch.Tensor, new: torch.Tensor, fp16: bool
) -> tuple[torch.Tensor, list[int]]:
    one, most = CODERS[name], bound(old.numel())
    message = torch.full((most + 8,), 0xA5, dtype=torch.uint8, device=one.device)
    facts = torch.full((FACTS + 1,), 77, dtype=torch.int64, device=one.device)
    old, new = old.to(one.device), new.to(one.device)
    with one.chosen():
        size = one.coder.encode(old, new, fp16, message[:most], facts[:FACTS])
    assert size <= most
    assert (message[size:] == 0xA5).all(), "nothing is written behind the message"
    assert int(facts[FACTS]) == 77
    return message[:size].cpu(), facts[:FACTS].tolist()


def told(name: str, message: torch.Tensor, old: torch.Tensor) -> tuple[int, torch.Tensor]:
    """What a coder finds of a message, and the weights that it leaves."""
    one = CODERS[name]
    weights = old.to(one.device, copy=True)
    found = torch.full((1,), -1, dtype=torch.int32, device=one.device)
    with one.chosen():
        decode_one(one.coder, message.to(one.device), weights, found)
    return int(found), weights.cpu()


def decoded(name: str, message: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    found, weights = told(name, message, old)
    if found:
        raise code.Mismatch(found)
    return weights


def examples(name: str, number: int) -> int:
    return max(number // CODERS[name].fewer, 1)


def sized(name: str, numel: int) -> int:
    return min(numel, CODERS[name].most)


def moved(old: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Weights, int64 [n], `d` representable numbers further."""

    def on_line(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x & 0x8000 != 0, x ^ 0x7FFF, x)

    return on_line((on_line(old & 0xFFFF) + d) & 0xFFFF).to(torch.int16)


ANY, NORMAL, NARROW = "any", "normal", "narrow"


def changed(
    numel: int, seed: int, spread: int, share: float, kind: str = ANY, fp16: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights, and the same with a `share` of them up to `spread` representable numbers further.

    The old ones are any bit patterns, a layer's numbers, or numbers of few exponents.
    """
    random = torch.Generator().manual_seed(seed)
    if kind == ANY:
        old = torch.randint(0x10000, (numel,), generator=random)
        old[torch.rand(numel, generator=random) < 0.1] = SPECIAL[seed % len(SPECIAL)]
    else:
        numbers = 0.02 * torch.randn(numel, generator=random)
        numbers = numbers if kind == NORMAL else numbers.abs().clamp(0.01, 0.03)
        old = numbers.to(torch.float16 if fp16 else torch.bfloat16).view(torch.int16).to(torch.int64)
    step = torch.randint(-spread, spread + 1, (numel,), generator=random)
    step[torch.rand(numel, generator=random) >= share] = 0
    return old.to(torch.int16), moved(old, step)


def expected(old: torch.Tensor, new: torch.Tensor, fp16: bool = False) -> list[int]:
    return by_hand.encode(patterns(old), patterns(new), fp16)
