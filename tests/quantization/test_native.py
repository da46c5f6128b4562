"""The native CPU kernels: energies of long blocks, every length. Their bits: test_backends.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.backend_agreement import BITS, SEEDS, compress_by, gradient_of, same, sender_of

from megatron_patch.compensation import compress as reference
from megatron_patch.quantization import backends, native
from megatron_patch.quantization.layout import BlockLayout

pytestmark = pytest.mark.skipif(not native.variants(), reason="no compiler was there when this was installed")

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", [4, 1])
@pytest.mark.parametrize("variant", range(len(native.variants())))
def test_the_energies_of_a_long_block_are_as_exact_as_those_of_a_short_one(bits, variant):
    layout = BlockLayout.of(1_000_000, 1, bits, "shard")
    gradient = 1 + torch.rand(1_000_000, generator=torch.Generator().manual_seed(1))
    mine, theirs = sender_of(layout, CPU), sender_of(layout, CPU)
    payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
    with native.using(variant):
        compress_by(native, mine, gradient, payload)
    compress_by(reference, theirs, gradient, payload)
    torch.testing.assert_close(mine.statistics, theirs.statistics, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_length_from_1_to_1000_comes_back(bits):
    for size in range(1, 1001):
        layout = BlockLayout.of(size, 1, bits, 128)
        gradient = gradient_of(size, size, torch.float32, "plain")
        payload = torch.full((1, layout.payload_bytes), 0xFF, dtype=torch.uint8)
        sender = sender_of(layout, CPU)
        sender.compress(gradient, payload)
        decoded = torch.empty(size)
        backends.decompress(payload, sender.codec, layout, decoded)
        assert same(decoded, sender.codec.decode(payload, layout)[0])
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
        backends.decompress(payload, sender.codec, layout, decoded[-1][1])
    assert torch.equal(decoded[0][0], decoded[1][0])
    assert torch.equal(decoded[0][1] * 2.0**exponent, decoded[1][1])
