"""The coders of the entropy code, called by name, and weights for their tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from simulation import entropy_coder as by_hand
from weights.weight_coders import GPU, NO_INTERPRETER, SPECIAL, Coder, decode_one, parametrized, patterns

from megatron_patch.quantization import native
from megatron_patch.weights import code as weight_code
from megatron_patch.weights import entropy_code
from megatron_patch.weights import native as native_weights
from megatron_patch.weights.entropy_code import FACTS, bound
from megatron_patch.weights.triton_kernels import entropy

_native = SimpleNamespace(encode=native_weights.encode_entropy, decode=native_weights.decode_entropy)
_triton = SimpleNamespace(encode=entropy.encode_entropy, decode=entropy.decode_entropy)
CODERS = {
    "reference": Coder(entropy_code, fewer=8),
    **{name: Coder(_native, variant=index) for index, name in enumerate(native.variants())},
    "triton-interpreted": Coder(_triton, fewer=100, most=300, without=NO_INTERPRETER),
    "triton-gpu": Coder(_triton, "cuda", without=GPU),
}
every_coder = parametrized(CODERS, [*CODERS])
cpu_coders = parametrized(CODERS, [name for name in CODERS if CODERS[name].device == "cpu"])


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
    weight_code.check(found)
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
