"""The uniform and the sign codec: bounds, bytes, what is odd, and equality with the float64 simulation.

Codes and scales are read off the payload, as docs/numerics.md says where they are.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.loco_float64 import LoCoSimulation

from megatron_patch import loco, registry
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.codec import Encoded, check_codec, codec_of
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import unpack
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

ALL_BITS = [8, 4, 2, 1]
LEVELS = {8: 127, 4: 7, 2: 1, 1: 1}
CODECS = {bits: Sign() if bits == 1 else Uniform(bits) for bits in ALL_BITS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOAT32_MAX = float(np.finfo(np.float32).max)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
lists = st.lists(finite, min_size=1, max_size=70)
block_sizes = st.sampled_from([16, 32, 128, "shard"])


def training_gradients(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose size varies by e^6 between stretches of 16, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    columns = shape[-1]
    size = torch.exp(-12 + 6 * torch.rand(math.ceil(columns / 16), generator=generator))
    size[torch.rand(size.shape, generator=generator) < 0.1] = 0
    return values * size.repeat_interleave(16)[:columns]


def encoded(h: torch.Tensor, layout: BlockLayout, poison: int = 0xA5) -> tuple[torch.Tensor, Encoded]:
    """The payload of blocks, [N, blocks, b], and what the codec says that it sent."""
    payload = torch.full((layout.shards, layout.payload_bytes), poison, dtype=torch.uint8)
    return payload, CODECS[layout.bits].encode(h, layout, payload)


def codes_of(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[N, S]: two's complement, and at 1 bit +1 for a set bit, -1 for a clear one."""
    raw = unpack(payload[:, : -(-layout.shard_size * layout.bits // 8)], layout.bits, layout.shard_size)
    if layout.bits == 1:
        return raw * 2 - 1
    wrapped = raw.int() % 2**layout.bits
    return torch.where(wrapped < 2 ** (layout.bits - 1), wrapped, wrapped - 2**layout.bits).to(torch.int8)


def scales_of(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """fp32 [N, blocks]: little-endian bf16 after the codes."""
    stored = payload[:, layout.code_bytes : layout.code_bytes + 2 * layout.blocks].contiguous()
    return stored.view(torch.bfloat16).float()


def encode(values: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, S], scales [N, blocks], payload) of a bucket."""
    payload, _ = encoded(layout.cut(values), layout)
    return codes_of(payload, layout), scales_of(payload, layout), payload


def decode(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[n, S]."""
    return layout.join(CODECS[layout.bits].decode(payload, layout))


def decompress_reduce(
    payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    loco.decompress_reduce(payloads, CODECS[layout.bits], layout, output, divisor)


def per_element(scales: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    return layout.join(scales[..., None].expand(-1, -1, layout.block))


# --- scales ----------------------------------------------------------------------------------------------


def test_each_number_of_bits_has_its_codec():
    found = {bits: codec_of(CompressionConfig(method="naive", bits=bits)) for bits in (8, 4, 2, 1)}
    named = {bits: (codec.name, codec.bits, codec.rotation.rotated) for bits, codec in found.items()}
    levels = {bits: ("levels", bits, True) for bits in (4, 2)}
    assert named == levels | {8: ("uniform", 8, False), 1: ("sign", 1, False)}


def test_a_codec_can_be_asked_for_by_its_name():
    for name, entry in registry.codecs().items():
        for bits in entry.bits:
            asked = CompressionConfig(method="naive", bits=bits, codec=name, rotation="none")
            assert (codec_of(asked).name, codec_of(asked).bits) == (name, bits)
            assert not codec_of(asked).rotation.rotated


# --- payloads --------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 400), st.sampled_from(ALL_BITS), block_sizes)
@settings(max_examples=100, deadline=None)
def test_every_byte_of_a_payload_is_written_and_the_fill_is_zero(shards, size, bits, block_size):
    layout = BlockLayout.of(shards * size, shards, bits, block_size)
    h = layout.cut(training_gradients(shards * size, seed=size))
    written = [encoded(h, layout, poison=poison)[0] for poison in (0x00, 0xFF)]
    assert torch.equal(*written)
    packed = -(-size * bits // 8)
    assert not written[0][:, packed : layout.code_bytes].any()
    assert not written[0][:, layout.code_bytes + 2 * layout.blocks :].any()


@given(st.integers(1, 5), st.integers(1, 400), st.sampled_from(ALL_BITS), block_sizes)
@settings(max_examples=100, deadline=None)
def test_a_payload_decodes_to_scale_times_code(shards, size, bits, block_size):
    layout = BlockLayout.of(shards * size, shards, bits, block_size)
    h = layout.cut(training_gradients(shards * size, seed=size))
    payload, sent = encoded(h, layout)
    codes, scales = codes_of(payload, layout), scales_of(payload, layout)
    decoded = decode(payload, layout)
    assert torch.equal(decoded, codes.float() * per_element(scales, layout))
    assert torch.equal(decoded, layout.join(sent.values))
    assert sent.finite.all()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_what_is_sent_of_fill_and_of_blocks_that_are_not_finite_is_zero(bits):
    layout = BlockLayout.of(2 * 100 - 30, 2, bits, 32)
    h = torch.ones(layout.numel)
    h[40] = math.nan
    _, sent = encoded(layout.cut(h), layout)
    real = torch.arange(layout.block) < layout.lengths(torch.device("cpu"))[..., None]
    assert not sent.values[~real].any()
    assert not sent.finite[0, 1]
    assert sent.finite.sum() == sent.finite.numel() - 1
    assert not sent.values[0, 1].any()
    assert (sent.values[real & sent.finite[..., None]] > 0.9).all()


# --- the sum ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("divisor", [1, 5])
def test_the_sum_is_taken_in_fp32_in_rank_order(bits, dtype, divisor):
    senders, size = 5, 333
    layout = BlockLayout.of(senders * size, senders, bits, 64)
    payloads = torch.stack(
        [encode(training_gradients(senders * size, seed=n), layout)[2][2] for n in range(senders)]
    )
    output = torch.full((size,), 99.0, dtype=DTYPES[dtype])
    decompress_reduce(payloads, layout.part(2), output, divisor)
    total = np.zeros(size, dtype=np.float32)
    for payload in payloads:
        total = total + decode(payload[None], layout.part(2))[0].numpy()
    wanted = torch.from_numpy(total / np.float32(divisor)).to(DTYPES[dtype])
    assert torch.equal(output, wanted)


# --- the simulation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("block_size", [16, 128, "shard"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_codes_and_scales_are_those_of_the_simulation(bits, block_size, dtype):
    ranks, size = 3, 211
    gradients = (training_gradients(ranks, ranks * size, seed=bits) * 100).to(DTYPES[dtype])
    gradients[1, 5] = math.nan
    simulation = LoCoSimulation(
        ranks,
        ranks * size,
        bits=bits,
        block_size=block_size,
        codec=CODECS[bits].name,
        memory=False,
        gradient_dtype=dtype,
    )
    result = simulation.step(gradients.float().numpy())
    layout = BlockLayout.of(ranks * size, ranks, bits, block_size)
    for rank in range(ranks):
        codes, scales, payload = encode(gradients[rank], layout)
        np.testing.assert_array_equal(scales.numpy(), result.scales[rank])
        usable = per_element(scales > 0, layout).reshape(-1).numpy()
        # Without a scale a code says nothing.
        np.testing.assert_array_equal(codes.reshape(-1).numpy()[usable], result.codes[rank][usable])
        decoded = decode(payload, layout).reshape(-1).numpy()
        np.testing.assert_array_equal(decoded, result.sent[rank].astype(np.float32))


@given(lists, st.sampled_from(ALL_BITS), block_sizes)
@settings(max_examples=80, deadline=None)
def test_any_finite_gradient_is_sent_as_the_simulation_sends_it(values, bits, block_size):
    simulation = LoCoSimulation(
        1, len(values), bits=bits, codec=CODECS[bits].name, block_size=block_size, memory=False
    )
    result = simulation.step(np.array([values], dtype=np.float32))
    layout = BlockLayout.of(len(values), 1, bits, block_size)
    codes, scales, _ = encode(torch.tensor(values, dtype=torch.float32), layout)
    np.testing.assert_array_equal(scales.numpy(), result.scales[0])
    usable = per_element(scales > 0, layout)[0].numpy()
    np.testing.assert_array_equal(codes[0].numpy()[usable], result.codes[0][usable])


@pytest.mark.parametrize("block_size", [16, 4096, "shard"])
def test_the_check_of_registered_codecs_finds_no_fault_in_the_packages_own(block_size: int | str) -> None:
    for name in registry.OWN_CODECS:
        for bits in registry.codecs()[name].bits:
            check_codec(registry.codecs()[name], bits, block_size, torch.device("cpu"))
