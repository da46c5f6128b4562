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
from megatron_patch.quantization.packing import largest_scale as largest_scale_of
from megatron_patch.quantization.packing import round_up_to_bf16, unpack
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


def quantize(h: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, S], scales [N, blocks]) of blocks, [N, blocks, b]."""
    payload, _ = encoded(h, layout)
    return codes_of(payload, layout), scales_of(payload, layout)


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


def largest_scale(bits: int) -> float:
    return largest_scale_of(LEVELS[bits])


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


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_lowest_code_is_left_out(bits):
    layout = BlockLayout.of(64, 1, bits, 16)
    codes, _ = quantize(layout.cut(torch.linspace(-1, 1, 64)), layout)
    assert codes.min() == -LEVELS[bits]
    assert codes.max() == LEVELS[bits]


@given(st.floats(0, FLOAT32_MAX, width=32))
@settings(max_examples=100, deadline=None)
def test_rounding_up_gives_the_next_bf16(value):
    rounded = round_up_to_bf16(torch.tensor([value], dtype=torch.float32))
    result = rounded.item()
    assert result >= value
    if math.isinf(result):
        assert value > torch.finfo(torch.bfloat16).max
        return
    assert rounded.to(torch.bfloat16).float().item() == result
    if result > 0:
        below = (rounded.view(torch.int32) - 0x10000).view(torch.float32).item()
        assert below < value


@given(lists, st.sampled_from([8, 4, 2]), block_sizes)
@settings(max_examples=120, deadline=None)
def test_scales_are_bf16_from_a_over_l_within_one_bf16_step(values, bits, block_size):
    h = torch.tensor(values, dtype=torch.float32)
    layout = BlockLayout.of(len(values), 1, bits, block_size)
    _, scales = quantize(layout.cut(h), layout)
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)
    for index in range(layout.blocks):
        a = h[index * layout.block : (index + 1) * layout.block].abs().max().item()
        quotient = float(np.float32(a) / np.float32(LEVELS[bits]))
        scale = scales[0, index].item()
        if scale == largest_scale(bits):
            assert quotient >= scale or quotient > scale * (1 - 2**-7)
            continue
        assert scale >= quotient
        below = (scales[0, index : index + 1].contiguous().view(torch.int32) - 0x10000).view(torch.float32)
        assert scale == 0 or below.item() < quotient


@given(lists, block_sizes)
@settings(max_examples=80, deadline=None)
def test_the_scale_of_one_bit_is_the_mean_magnitude_of_the_real_elements(values, block_size):
    h = torch.tensor(values, dtype=torch.float32)
    layout = BlockLayout.of(len(values), 1, 1, block_size)
    scales = quantize(layout.cut(h), layout)[1][0]
    for index, scale in enumerate(scales.tolist()):
        block = h[index * layout.block : (index + 1) * layout.block].double()
        mean = math.fsum(block.abs().tolist()) / len(block)
        assert scale <= largest_scale(1)
        assert mean * (1 - 1e-6) - 1e-44 <= scale or scale == largest_scale(1)
        assert scale <= mean * (1 + 2**-7 + 1e-6) + 2**-133


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_largest_scale_is_the_last_bf16_whose_largest_code_is_finite(bits):
    scale = torch.tensor(largest_scale(bits))
    assert scale.to(torch.bfloat16).float() == scale
    assert torch.isfinite(scale * LEVELS[bits])
    following = (scale.view(torch.int32) + 0x10000).view(torch.float32)
    assert not torch.isfinite(following * LEVELS[bits])


# --- round trip ------------------------------------------------------------------------------------------


@given(lists, st.sampled_from([8, 4, 2]), block_sizes)
@settings(max_examples=120, deadline=None)
def test_each_element_is_off_by_at_most_half_a_scale(values, bits, block_size):
    h = torch.tensor(values, dtype=torch.float32)
    layout = BlockLayout.of(len(values), 1, bits, block_size)
    codes, scales, payload = encode(h, layout)
    decoded = decode(payload, layout)
    assert codes.abs().max() <= LEVELS[bits]
    assert torch.all(torch.isfinite(decoded))
    scale = per_element(scales, layout).double()
    lost = (h.double() - decoded[0].double()).abs()
    # a/L is an fp32 quotient, so L*s may miss a by one rounding of it; a scale of zero loses all of a block
    # whose a/L is below the smallest fp32; at the cap the largest element may lie above L*s by a bf16 step.
    slack = scale * LEVELS[bits] * 2.0**-23
    slack[scale == 0] = LEVELS[bits] * 2.0**-149
    slack[scale == largest_scale(bits)] += largest_scale(bits) * LEVELS[bits] * 2.0**-7
    assert torch.all(lost <= scale / 2 + slack)


def test_half_a_scale_is_a_bound_that_is_met():
    """A scale rounded down, or truncation instead of rounding, would break one of these two."""
    h = training_gradients(4 * 1024)
    layout = BlockLayout.of(h.numel(), 4, 4, 128)
    codes, scales, payload = encode(h, layout)
    lost = (h.view(4, -1).double() - decode(payload, layout)).abs()
    scale = per_element(scales, layout).double()
    assert torch.all(lost <= scale / 2 * (1 + 1e-6))
    assert (lost / scale)[scale > 0].max() > 0.49
    assert codes.abs().max() == 7


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("exponent", [-20, -3, 1, 12])
def test_a_power_of_two_changes_the_scale_and_no_code(bits, exponent):
    h = training_gradients(2 * 300, seed=bits)
    layout = BlockLayout.of(h.numel(), 2, bits, 64)
    codes, scales = quantize(layout.cut(h), layout)
    other_codes, other_scales = quantize(layout.cut(h * 2.0**exponent), layout)
    assert torch.equal(codes, other_codes)
    assert torch.equal(scales * 2.0**exponent, other_scales)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_opposite_gradient_has_opposite_codes(bits):
    h = training_gradients(256)
    h[h == 0] = 1e-6  # the sign of zero is +1 at 1 bit
    layout = BlockLayout.of(256, 1, bits, 64)
    codes, scales = quantize(layout.cut(h), layout)
    opposite, same = quantize(layout.cut(-h), layout)
    assert torch.equal(codes, -opposite)
    assert torch.equal(scales, same)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_codes_are_rounded_half_to_even(bits):
    h = torch.zeros(16)
    if bits == 1:
        h[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
        layout = BlockLayout.of(16, 1, 1, 16)
        assert quantize(layout.cut(h), layout)[0][0, :4].tolist() == [1, 1, 1, -1]
        return
    limit = LEVELS[bits]
    h[:6] = torch.tensor([limit, 0.5, -0.5, min(1.5, limit), -min(1.5, limit), min(2.5, limit)])
    layout = BlockLayout.of(16, 1, bits, 16)
    codes, scales = quantize(layout.cut(h), layout)
    assert scales.item() == 1.0
    wanted = [limit, 0, 0, 2, -2, 2] if limit > 1 else [1, 0, 0, 1, -1, 1]
    assert codes[0, :6].tolist() == wanted


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


def test_one_senders_payload_is_independent_of_the_others():
    layout = BlockLayout.of(3 * 100, 3, 4, 32)
    whole = encode(training_gradients(300), layout)[2]
    changed = training_gradients(300)
    changed[100:200] *= 3
    other = encode(changed, layout)[2]
    assert torch.equal(whole[0], other[0])
    assert torch.equal(whole[2], other[2])
    assert not torch.equal(whole[1], other[1])


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


def test_the_order_of_the_sum_shows():
    """Values for which another order gives another fp32 sum: 2^24 + 1 - 2^24."""
    layout = BlockLayout.of(3, 3, 1, 16)
    for values, wanted in (
        ((2.0**26, 1.0, -(2.0**26)), 0.0),
        ((2.0**26, -(2.0**26), 1.0), 1.0),
        ((1.0, 2.0**26, -(2.0**26)), 0.0),
    ):
        payloads = torch.stack([encode(torch.full((3,), value), layout)[2][0] for value in values])
        output = torch.empty(1)
        decompress_reduce(payloads, layout.part(0), output)
        assert output.item() == wanted


# --- odd gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block_size", [16, 64, "shard"])
def test_a_block_that_is_not_finite_decodes_to_nan_and_no_other_block_does(bits, poison, block_size):
    clean = training_gradients(3 * 150, seed=3)
    layout = BlockLayout.of(450, 3, bits, block_size)
    for place in (0, 149, 150, 299, 449):
        h = clean.clone()
        h[place] = poison
        _, scales, payload = encode(h, layout)
        decoded = decode(payload, layout)
        shard, inside = divmod(place, 150)
        block = inside // layout.block
        expected = torch.zeros(3, layout.blocks, dtype=torch.bool)
        expected[shard, block] = True
        assert torch.equal(torch.isnan(scales), expected)
        hit = torch.isnan(decoded)
        assert torch.equal(hit, per_element(expected, layout))
        untouched = decode(encode(clean, layout)[2], layout)
        assert torch.equal(decoded[~hit], untouched[~hit])


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nan_of_one_sender_reaches_the_sum(bits):
    layout = BlockLayout.of(2 * 64, 2, bits, 16)
    gradients = [training_gradients(128, seed=n) for n in range(2)]
    gradients[1][20] = math.nan
    payloads = torch.stack([encode(g, layout)[2][0] for g in gradients])
    output = torch.empty(64)
    decompress_reduce(payloads, layout.part(0), output, 2)
    assert torch.equal(torch.isnan(output), (torch.arange(64) >= 16) & (torch.arange(64) < 32))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_zeros_are_sent_as_zeros(bits):
    layout = BlockLayout.of(2 * 100, 2, bits, 32)
    _, scales, payload = encode(torch.zeros(200), layout)
    assert not scales.any()
    assert not decode(payload, layout).any()


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("value", [1e-45, 1e-42, 1e-39, 1.1754944e-38, 1e38, 2e38, FLOAT32_MAX, -FLOAT32_MAX])
def test_the_ends_of_fp32_stay_finite_and_close(bits, value):
    layout = BlockLayout.of(100, 1, bits, 32)
    h = torch.full((100,), value)
    h[::3] = 0
    h[0] = value
    _, scales, payload = encode(h, layout)
    decoded = decode(payload, layout)[0]
    assert torch.all(torch.isfinite(decoded))
    assert torch.all(decoded * torch.sign(h) >= 0)
    if bits > 1:
        # Half a scale for what is inside the codes' range, and a bf16 step of what the cap cuts off.
        bound = per_element(scales, layout)[0].double() / 2 + abs(value) * 2**-7 + LEVELS[bits] * 2**-149
        assert torch.all((h.double() - decoded.double()).abs() <= bound)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_gradient_s_values_count_not_its_bits(dtype, bits):
    """bf16 read as fp16, or the other way, would give other numbers."""
    values = (training_gradients(2 * 300) * 1000).to(DTYPES[dtype])
    layout = BlockLayout.of(600, 2, bits, 128)
    payload = encode(values, layout)[2]
    assert torch.equal(payload, encode(values.float(), layout)[2])
    decoded = decode(payload, layout).reshape(-1)
    large = values.float().abs() > 1e-2
    assert torch.all(torch.sign(decoded[large]) * torch.sign(values.float()[large]) >= 0)


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
        step = np.abs(codes.reshape(-1).numpy().astype(int) - result.codes[rank])
        step[~usable] = 0  # without a scale a code says nothing
        assert step.max() <= 1
        assert not step[~result.near_tie[rank]].any()
        exact = step == 0
        decoded = decode(payload, layout).reshape(-1).numpy()
        sound = exact & ~np.isnan(decoded)
        np.testing.assert_array_equal(decoded[sound], result.sent[rank][sound].astype(np.float32))


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
    usable = per_element(scales > 0, layout)[0].numpy() & ~result.near_tie[0]
    np.testing.assert_array_equal(codes[0].numpy()[usable], result.codes[0][usable])


@pytest.mark.parametrize("block_size", [16, 4096, "shard"])
def test_the_check_of_registered_codecs_finds_no_fault_in_the_packages_own(block_size: int | str) -> None:
    for name in registry.OWN_CODECS:
        for bits in registry.codecs()[name].bits:
            check_codec(registry.codecs()[name], bits, block_size, torch.device("cpu"))
