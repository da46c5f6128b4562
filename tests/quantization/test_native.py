"""The native CPU kernels against the torch reference: the same bits, for every variant of the code."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.compensation.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import kernels, native, reference
from megatron_patch.quantization.blocks import BlockLayout

pytestmark = pytest.mark.skipif(not native.variants(), reason="no compiler was there when this was installed")

CPU = torch.device("cpu")
VARIANTS = st.integers(0, max(len(native.variants()) - 1, 0))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BITS = st.sampled_from([8, 4, 2, 1])
BLOCKS = st.sampled_from([16, 64, 128, 1024, "shard"])


def gradient_of(numel: int, seed: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Random numbers whose size varies, with stretches of zeros; `kind` adds what may go wrong."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(-8 * torch.rand(-(-numel // 40), generator=generator)).repeat_interleave(40)[:numel]
    size[torch.rand(numel, generator=generator) < 0.1] = 0
    values = torch.randn(numel, generator=generator) * size
    somewhere = torch.randint(numel, (3,), generator=generator)
    if kind == "not finite":
        values[somewhere] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    elif kind == "huge":
        values *= 3e38 / values.abs().max().clamp(min=1e-30)
    elif kind == "tiny":
        values *= 1e-40
    elif kind == "ties":
        values = torch.randint(-7, 8, (numel,), generator=generator) / 2.0
    return values.to(dtype)


def with_torch(sender: Sender, gradient: torch.Tensor, payload: torch.Tensor) -> None:
    os.environ[kernels.VARIABLE] = "torch"
    try:
        sender.compress(gradient, payload)
    finally:
        del os.environ[kernels.VARIABLE]


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    as_bytes = (x.contiguous().view(torch.uint8) for x in (mine, theirs))
    return torch.equal(*as_bytes)


@given(
    numel=st.integers(1, 3000),
    shards=st.integers(1, 5),
    bits=BITS,
    block_size=BLOCKS,
    dtype=DTYPES,
    error_dtype=st.sampled_from(["int8", "bf16", "fp32", None]),
    beta=st.sampled_from([0.0, 0.5, 0.8]),
    stochastic=st.booleans(),
    kind=st.sampled_from(["plain", "not finite", "huge", "tiny", "ties"]),
    variant=VARIANTS,
    seed=st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_codes_scales_and_errors_are_the_reference_s_bits(
    numel, shards, bits, block_size, dtype, error_dtype, beta, stochastic, kind, variant, seed
):
    options: dict[str, Any] = {"bits": bits, "block_size": block_size, "method": "naive"}
    if stochastic and bits > 1:
        options["rounding"] = "stochastic"
    if error_dtype is not None:
        options |= {"method": "loco", "error_dtype": error_dtype, "error_beta": beta}
    config = CompressionConfig(**options)
    layout = BlockLayout.of(numel, shards, bits, block_size)
    mine, theirs = (Sender(config, layout, CPU, stream=3) for _ in range(2))
    sent, wanted = (torch.empty(shards, layout.payload_bytes, dtype=torch.uint8) for _ in range(2))
    for step in range(3):
        gradient = gradient_of(numel, seed + step, dtype, kind if step == 1 else "plain")
        sent.fill_(0xA5)
        wanted.fill_(0x5A)
        kept = gradient.clone()
        with native.using(variant):
            mine.compress(gradient, sent)
        with_torch(theirs, gradient, wanted)
        assert same(gradient, kept), "the gradient is read only"
        assert same(sent, wanted)
        if mine.error is not None and theirs.error is not None:
            for name, tensor in mine.error.tensors().items():
                assert same(tensor, theirs.error.tensors()[name]), name
        assert mine.statistics[4] == theirs.statistics[4]
        smallest = 1e-20 * float(theirs.statistics[:4].max())  # beside the largest, it does not matter
        torch.testing.assert_close(mine.statistics[:4], theirs.statistics[:4], rtol=1e-5, atol=smallest)


@given(
    size=st.integers(1, 1500),
    senders=st.integers(1, 9),
    bits=BITS,
    block_size=BLOCKS,
    dtype=DTYPES,
    average=st.booleans(),
    kind=st.sampled_from(["plain", "not finite", "huge", "tiny"]),
    short=st.integers(0, 20),
    variant=VARIANTS,
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_the_reduced_shard_is_the_reference_s_bits(
    size, senders, bits, block_size, dtype, average, kind, short, variant, seed
):
    layout = BlockLayout.of(size, 1, bits, block_size)
    payloads = torch.empty(senders, layout.payload_bytes, dtype=torch.uint8)
    for index in range(senders):
        sender = Sender(CompressionConfig(method="naive", bits=bits, block_size=block_size), layout, CPU)
        gradient = gradient_of(size, seed + index, torch.float32, kind if index == 0 else "plain")
        with_torch(sender, gradient, payloads[index : index + 1])
    length = max(size - short, 1)
    divisor = senders if average else 1
    found, wanted = (torch.full((length + 8,), 7.0, dtype=dtype) for _ in range(2))
    with native.using(variant):
        native.decompress_reduce(payloads, layout, found[:length], divisor)
    reference.decompress_reduce(payloads, layout, wanted[:length], divisor)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same(found.nan_to_num(), wanted.nan_to_num())
    assert (found[length:] == 7).all(), "nothing is written beyond the shard"


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_length_from_1_to_1000_comes_back(bits):
    for size in range(1, 1001):
        layout = BlockLayout.of(size, 1, bits, 128)
        gradient = gradient_of(size, size, torch.float32, "plain")
        payload = torch.full((1, layout.payload_bytes), 0xFF, dtype=torch.uint8)
        Sender(CompressionConfig(method="naive", bits=bits), layout, CPU).compress(gradient, payload)
        decoded = torch.empty(size)
        kernels.decompress(payload, layout, decoded)
        assert same(decoded, reference.read_payload(payload, layout)[0])
        if bits > 1:
            scales = payload[0, layout.code_bytes :][: 2 * layout.blocks].view(torch.bfloat16).float()
            half = scales.repeat_interleave(128)[:size] / 2
            assert ((gradient - decoded).abs() <= half * (1 + 1e-6)).all()


@given(bits=st.sampled_from([8, 4, 2, 1]), exponent=st.integers(-20, 20), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_power_of_two_changes_the_scales_and_not_the_codes(bits, exponent, seed):
    layout = BlockLayout.of(1000, 2, bits, 128)
    gradient = gradient_of(1000, seed, torch.float32, "plain")
    decoded = []
    for factor in (1.0, 2.0**exponent):
        sender = Sender(CompressionConfig(bits=bits), layout, CPU)
        payload = torch.empty(2, layout.payload_bytes, dtype=torch.uint8)
        for _ in range(3):
            sender.compress(gradient * factor, payload)
        decoded.append((payload[:, : layout.code_bytes].clone(), torch.empty(1000)))
        kernels.decompress(payload, layout, decoded[-1][1])
    assert torch.equal(decoded[0][0], decoded[1][0])
    assert torch.equal(decoded[0][1] * 2.0**exponent, decoded[1][1])


def test_the_reference_can_be_asked_for(monkeypatch):
    assert kernels.fused(CPU) is native
    assert native.variants()[-1] in kernels.describe(CPU)
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    assert kernels.fused(CPU) is None
    assert kernels.describe(CPU) == "torch reference"


def test_without_the_library_the_reference_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(native, "variants", tuple)
    assert kernels.fused(CPU) is None
    assert "no compiler" in kernels.describe(CPU)
