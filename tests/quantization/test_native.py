"""The native CPU kernels against the torch reference: the same bits, for every variant of the code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantization.kernel_agreement import (
    BITS,
    COMPRESS,
    DECOMPRESS,
    SEEDS,
    check_compress,
    check_decompress_reduce,
    gradient_of,
    same,
    sender_of,
)

from megatron_patch.quantization import backends, native, reference
from megatron_patch.quantization.layout import BlockLayout

pytestmark = pytest.mark.skipif(not native.variants(), reason="no compiler was there when this was installed")

CPU = torch.device("cpu")
VARIANTS = st.integers(0, max(len(native.variants()) - 1, 0))
BLOCKS = st.sampled_from([16, 64, 128, 1024, "shard"])


@given(
    numel=st.integers(1, 3000),
    shards=st.integers(1, 5),
    bits=BITS,
    block_size=BLOCKS,
    variant=VARIANTS,
    **COMPRESS,
)
@example(  # a gradient of -0 with a code of 0: what is lost is -0
    numel=116,
    shards=1,
    bits=8,
    block_size=16,
    variant=0,
    dtype=torch.float32,
    error_dtype="bf16",
    beta=0.0,
    stochastic=False,
    kind="tiny",
    seed=0,
)
@settings(max_examples=300, deadline=None)
def test_codes_scales_and_errors_are_the_reference_s_bits(
    numel, shards, bits, block_size, variant, **options
):
    with native.using(variant):
        check_compress(native, BlockLayout.of(numel, shards, bits, block_size), device=CPU, **options)


@given(
    size=st.integers(1, 1500),
    bits=BITS,
    block_size=BLOCKS,
    variant=VARIANTS,
    **DECOMPRESS,
)
@settings(max_examples=200, deadline=None)
def test_the_reduced_shard_is_the_reference_s_bits(size, bits, block_size, variant, **options):
    with native.using(variant):
        check_decompress_reduce(native, BlockLayout.of(size, 1, bits, block_size), device=CPU, **options)


@pytest.mark.parametrize("bits", [4, 1])
@pytest.mark.parametrize("variant", range(len(native.variants())))
def test_the_energies_of_a_long_block_are_as_exact_as_those_of_a_short_one(bits, variant):
    layout = BlockLayout.of(1_000_000, 1, bits, "shard")
    gradient = 1 + torch.rand(1_000_000, generator=torch.Generator().manual_seed(1))
    mine, theirs = sender_of(layout, CPU), sender_of(layout, CPU)
    payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
    with native.using(variant):
        native.compress(gradient, payload, layout, {}, 0.0, None, mine.statistics)
    theirs.compress_in_torch(gradient, payload, None)
    torch.testing.assert_close(mine.statistics, theirs.statistics, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_length_from_1_to_1000_comes_back(bits):
    for size in range(1, 1001):
        layout = BlockLayout.of(size, 1, bits, 128)
        gradient = gradient_of(size, size, torch.float32, "plain")
        payload = torch.full((1, layout.payload_bytes), 0xFF, dtype=torch.uint8)
        sender_of(layout, CPU).compress(gradient, payload)
        decoded = torch.empty(size)
        backends.decompress(payload, layout, decoded)
        assert same(decoded, reference.read_payload(payload, layout)[0])
        if bits > 1:
            scales = payload[0, layout.code_bytes :][: 2 * layout.blocks].view(torch.bfloat16).float()
            half = scales.repeat_interleave(128)[:size] / 2
            assert ((gradient - decoded).abs() <= half * (1 + 1e-6)).all()


@given(bits=BITS, exponent=st.integers(-20, 20), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_power_of_two_changes_the_scales_and_not_the_codes(bits, exponent, seed):
    layout = BlockLayout.of(1000, 2, bits, 128)
    gradient = gradient_of(1000, seed, torch.float32, "plain")
    decoded = []
    for factor in (1.0, 2.0**exponent):
        sender = sender_of(layout, CPU, "int8", 0.8)
        payload = torch.empty(2, layout.payload_bytes, dtype=torch.uint8)
        for _ in range(3):
            sender.compress(gradient * factor, payload)
        decoded.append((payload[:, : layout.code_bytes].clone(), torch.empty(1000)))
        backends.decompress(payload, layout, decoded[-1][1])
    assert torch.equal(decoded[0][0], decoded[1][0])
    assert torch.equal(decoded[0][1] * 2.0**exponent, decoded[1][1])


def test_the_reference_can_be_asked_for(monkeypatch):
    assert backends.fused(CPU) is native
    assert native.variants()[-1] in backends.describe(CPU)
    monkeypatch.setenv(backends.VARIABLE, "torch")
    assert backends.fused(CPU) is None
    assert backends.VARIABLE in backends.describe(CPU)


def test_without_the_library_the_reference_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(native, "variants", tuple)
    assert backends.fused(CPU) is None
    assert "no compiler" in backends.describe(CPU)
