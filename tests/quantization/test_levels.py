"""The levels codec: what it loses of which distribution, its ties and zeros, equality with the simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.backend_agreement import sender_of
from simulation.codes import LEVELS as SIMULATED
from simulation.codes import Code

from megatron_patch.collectives.sender import decompress
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import LEVELS, STEPS, Levels

CPU = torch.device("cpu")
MAX_QUANTIZER = {4: 0.009501, 2: 0.1175}
"""What the best quantizer of a Gaussian loses with 16 and 4 levels (Max 1960, table I)."""


def lost(values: torch.Tensor, **options: object) -> float:
    """The share of the energy that is lost, through payloads."""
    config = CompressionConfig(method="naive", **options)
    layout = BlockLayout.of(values.numel(), 4, config.bits, 128)
    sender = sender_of(layout, CPU, **options)
    payload, found = torch.empty(4, layout.payload_bytes, dtype=torch.uint8), torch.empty_like(values)
    sender.compress(values, payload)
    decompress(payload, sender.codec, layout, found)
    return float((found - values).double().square().sum() / values.double().square().sum())


def gaussian_loss(levels: tuple[int, ...], step: float) -> float:
    """E (x - q(x))^2 of a standard normal x, by the integral over every level's interval."""
    ends = [0.0, *(step * (a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    phi = [math.exp(-end * end / 2) / math.sqrt(2 * math.pi) if end < math.inf else 0.0 for end in ends]
    cdf = [math.erf(end / math.sqrt(2)) / 2 if end < math.inf else 0.5 for end in ends]
    total = 0.0
    for k, level in enumerate(levels):
        t, mass = level * step, cdf[k + 1] - cdf[k]
        first = phi[k] - phi[k + 1]
        upper = ends[k + 1] * phi[k + 1] if ends[k + 1] < math.inf else 0.0
        total += mass + ends[k] * phi[k] - upper - 2 * t * first + t * t * mass
    return 2 * total


@pytest.mark.parametrize("bits", [4, 2])
def test_levels_are_as_good_for_a_gaussian_as_the_best_there_are(bits):
    assert LEVELS[bits] == tuple(SIMULATED[bits])
    best = gaussian_loss(LEVELS[bits], STEPS[bits])
    assert best < 1.003 * MAX_QUANTIZER[bits]
    assert best >= 0.999 * MAX_QUANTIZER[bits]
    for other in (0.98, 1.02):
        assert gaussian_loss(LEVELS[bits], STEPS[bits] * other) > best


@pytest.mark.parametrize(("bits", "wanted"), [(4, 0.0092), (2, 0.1145)])
def test_rotated_blocks_lose_as_little_whatever_their_distribution(bits, wanted):
    torch.manual_seed(bits)
    shape = (2000, 128)
    drawn = {
        "gauss": torch.randn(shape),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample(shape),
        "student t": torch.distributions.StudentT(4.0).sample(shape),
        "columns of unlike size": torch.randn(shape) * torch.randn(128).exp(),
        "one large": torch.randn(shape) + 30 * (torch.rand(shape) < 0.002),
    }
    for name, values in drawn.items():
        share = lost(values.flatten(), bits=bits)
        assert 0.85 * wanted < share < 1.04 * wanted, name
        if name != "gauss":
            assert lost(values.flatten(), bits=bits, rotation="none") > 1.3 * share, name
            assert lost(values.flatten(), bits=bits, codec="uniform") > 1.3 * share, name


@given(st.integers(0, 2000), st.sampled_from([4, 2]), st.sampled_from([-140, -60, -3, 0, 9, 100, 127]))
@settings(max_examples=120, deadline=None)
def test_codes_and_scales_are_those_of_the_simulation(seed, bits, exponent):
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 129))
    kind = generator.integers(4)
    values = generator.standard_normal(size) if kind else generator.integers(-3, 4, size)
    values = (values * (generator.random(size) > 0.3) if kind == 1 else values).astype(np.float64)
    with np.errstate(over="ignore"):
        h = np.float32(np.ldexp(values / max(np.abs(values).max(), 1e-9), exponent))
    layout = BlockLayout.of(size, 1, bits, 128)
    payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
    sent = Levels(bits).encode(layout.cut(torch.from_numpy(h)), layout, payload)
    code = Code("levels", bits)
    scale = code.scale(h)
    wanted = scale * code.codes(h, scale).astype(np.float32)
    np.testing.assert_array_equal(layout.flat(sent.values).numpy(), wanted)
    np.testing.assert_array_equal(layout.flat(Levels(bits).decode(payload, layout)).numpy(), wanted)


@pytest.mark.parametrize("bits", [4, 2])
def test_the_middle_of_two_levels_gets_the_smaller(bits):
    levels = LEVELS[bits]
    layout = BlockLayout.of(128, 1, bits, 128)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    h = torch.zeros(1, 1, 128)
    h[..., : len(middles)] = torch.tensor(middles)
    h[..., 8 : 8 + len(middles)] = -torch.tensor(middles)
    codec = Levels(bits)
    noise = torch.randn(112, generator=torch.Generator().manual_seed(1))
    # What fills the block up to the energy for which the scale is 1.
    for factor in np.linspace(0.97, 1.03, 61):
        missing = 128 * (factor / STEPS[bits]) ** 2 - float(h[..., :16].square().sum())
        h[..., 16:] = math.sqrt(missing / float(noise.square().sum())) * noise
        if codec.scales(h, layout).item() == 1.0:
            break
    assert codec.scales(h, layout).item() == 1.0
    payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
    sent = codec.encode(h, layout, payload).values[0, 0]
    assert sent[: len(middles)].tolist() == list(levels[:-1])[: len(middles)]
    assert sent[8 : 8 + len(middles)].tolist() == [-level for level in levels[:-1]]


def test_the_root_of_the_mean_square_is_rounded_once():
    """Squares that sum to 18952 over 14 numbers: torch's fp32 root is an ulp too large on some CPUs, and the
    scale then the next bf16 number."""
    whole = np.array([101, 93, 10, 1, 1] + [0] * 9)
    assert (whole**2).sum() == 18952
    h = np.float32(whole / 512)
    layout = BlockLayout.of(14, 1, 4, 16)
    scale = Levels(4).scales(layout.cut(torch.from_numpy(h)), layout)
    assert scale.item() == Code("levels", 4).scale(h)
