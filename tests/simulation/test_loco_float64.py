"""The simulation checked from first principles, before anything else is checked against it.

Bounds follow from the definitions alone: rounding is off by at most half a scale, errors telescope, what is
finite stays finite. Exact rationals and a search over all 32,640 bf16 numbers stand in for bit tricks.
"""

from __future__ import annotations

import bisect
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded

from simulation.codes import FLOAT32_MAX, Code, bf16_down, bf16_nearest, bf16_up
from simulation.loco_float64 import LoCoSimulation as Simulation

# All finite non-negative bf16 numbers, in order, by decoding every 15-bit pattern with its definition.
ALL_BF16 = [
    (float(mantissa) * 2.0**-133 if exponent == 0 else (1 + mantissa / 128) * 2.0 ** (exponent - 127))
    for exponent in range(255)
    for mantissa in range(128)
]
BF16_MAX = ALL_BF16[-1]


def LoCoSimulation(*sizes: int, bits: int, **options: Any) -> Simulation:
    """With multiples of a scale, or a sign: what the bounds here are of."""
    return Simulation(*sizes, bits=bits, codec="uniform" if bits > 1 else "sign", **options)


def levels(bits: int) -> int:
    """L, the largest code."""
    return Code("uniform" if bits > 1 else "sign", bits).largest


finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def gradients_like_training(ranks: int, numel: int, seed: int = 0) -> np.ndarray:
    """Normal numbers whose size differs between columns by a factor of up to e^6."""
    random = np.random.default_rng(seeded(seed))
    size = np.exp(random.uniform(-12, -6, size=numel))
    return (random.standard_normal((ranks, numel)) * size).astype(np.float32)


def per_element(simulation: Simulation, scales: np.ndarray) -> np.ndarray:
    """scales [ranks, shards, blocks] repeated to [ranks, numel]."""
    lengths = [stop - start for start, stop in simulation.blocks]
    return np.repeat(scales, lengths, axis=2).reshape(simulation.ranks, simulation.numel)


# --- bf16 ------------------------------------------------------------------------------------------------


@given(st.floats(min_value=0, max_value=BF16_MAX, width=32))
@settings(max_examples=500, deadline=None)
def test_bf16_up_is_the_smallest_bf16_not_below(value):
    assert float(bf16_up(value)) == ALL_BF16[bisect.bisect_left(ALL_BF16, value)]


@given(st.floats(min_value=0, max_value=float(FLOAT32_MAX)))
@settings(max_examples=500, deadline=None)
def test_bf16_down_is_the_largest_bf16_not_above(value):
    assert float(bf16_down(value)) == ALL_BF16[bisect.bisect_right(ALL_BF16, value) - 1]


@given(st.floats(min_value=-BF16_MAX, max_value=BF16_MAX, width=32))
@settings(max_examples=500, deadline=None)
def test_bf16_nearest_has_no_closer_neighbour_and_ties_go_to_even(value):
    magnitude = abs(value)
    above = bisect.bisect_left(ALL_BF16, magnitude)
    candidates = {above, max(above - 1, 0)}
    expected = min(candidates, key=lambda i: (abs(Fraction(ALL_BF16[i]) - Fraction(magnitude)), i % 2))
    assert abs(float(bf16_nearest(value))) == ALL_BF16[expected]
    assert np.signbit(bf16_nearest(value)) == np.signbit(np.float32(value))


@pytest.mark.parametrize("limit", [127, 7, 1])
def test_the_cap_is_the_last_bf16_whose_largest_code_is_finite(limit):
    cap = float(bf16_down(float(FLOAT32_MAX) / limit))
    following = ALL_BF16[ALL_BF16.index(cap) + 1] if cap < BF16_MAX else np.inf
    assert np.isfinite(np.float32(limit) * np.float32(cap))
    assert limit * following > float(FLOAT32_MAX)


# --- one step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("block_size", [16, 128, "shard"])
def test_each_element_is_off_by_at_most_half_a_scale(bits, block_size):
    simulation = LoCoSimulation(2, 2 * 200, bits=bits, block_size=block_size)
    for step in range(5):
        gradients = gradients_like_training(2, 400, seed=step)
        h = (gradients + simulation.errors().astype(np.float32)).astype(np.float64)
        result = simulation.step(gradients)
        scale = per_element(simulation, result.scales).astype(np.float64)
        # a/L is an fp32 quotient, so L*s may miss a by one rounding of it.
        assert np.all(np.abs(h - result.sent) <= scale * (0.5 + levels(bits) * 2**-24))
        assert np.abs(result.codes).max() == levels(bits)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_scale_is_the_first_bf16_from_a_over_l(bits):
    simulation = LoCoSimulation(2, 2 * 200, bits=bits, block_size=64, memory=False)
    gradients = gradients_like_training(2, 400)
    scales = simulation.step(gradients).scales
    assert scales.shape == (2, 2, 4)
    for rank in range(2):
        for shard in range(2):
            for block, (start, stop) in enumerate([(0, 64), (64, 128), (128, 192), (192, 200)]):
                a = np.abs(gradients[rank, shard * 200 + start : shard * 200 + stop]).max()
                quotient = float(np.float32(a) / np.float32(levels(bits)))
                expected = ALL_BF16[bisect.bisect_left(ALL_BF16, quotient)]
                assert float(scales[rank, shard, block]) == expected
                assert expected < quotient * (1 + 2**-7)


def test_one_bit_sends_the_sign_and_the_mean():
    simulation = LoCoSimulation(1, 16, bits=1, block_size=16, memory=False)
    gradients = np.array([[0.0, -0.0, 1, -1, 2, -2, 3, -3, 1, 1, 1, 1, -4, -4, -4, -4]], dtype=np.float32)
    result = simulation.step(gradients)
    assert float(result.scales[0, 0, 0]) == 2.0  # the mean of |h| is 32/16
    # Zero, of either sign, counts as positive.
    assert result.codes[0].tolist() == [1, 1, 1, -1, 1, -1, 1, -1, 1, 1, 1, 1, -1, -1, -1, -1]
    assert np.array_equal(result.sent, 2.0 * result.codes)


@given(st.lists(finite_float32, min_size=1, max_size=40), st.sampled_from([8, 4, 2, 1]))
@settings(max_examples=300, deadline=None)
def test_any_finite_gradient_is_sent_finite_and_with_the_right_sign(values, bits):
    gradients = np.array([values], dtype=np.float32)
    simulation = LoCoSimulation(1, len(values), bits=bits, block_size=16)
    result = simulation.step(gradients)
    assert np.all(np.isfinite(result.sent))
    assert np.all(np.abs(result.sent) <= FLOAT32_MAX)
    assert np.all(np.isfinite(result.errors))
    assert np.all(result.sent * np.sign(gradients) >= 0)
    assert np.array_equal(result.shards[0], result.sent[0].astype(np.float32))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_halves_round_to_even(bits):
    limit = levels(bits)
    # The largest element fixes s = 1 (a power of two, so h/s is exact).
    values = np.full(16, 0.25, dtype=np.float32)
    values[:4] = [limit, 0.5, -0.5, min(2.5, limit)]
    result = LoCoSimulation(1, 16, bits=bits, block_size=16, memory=False).step(values[None])
    assert float(result.scales[0, 0, 0]) == 1.0
    assert result.codes[0, :4].tolist() == [limit, 0, 0, 2 if limit > 2 else 1]


# --- the sum ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [False, True])
def test_owners_get_the_sum_or_the_mean_over_ranks(average):
    ranks, numel = 4, 4 * 96
    gradients = gradients_like_training(ranks, numel)
    simulation = LoCoSimulation(ranks, numel, bits=8, block_size=32, average=average)
    result = simulation.step(gradients)
    exact = gradients.astype(np.float64).sum(axis=0) / (ranks if average else 1)
    # Every sender is off by half its scale; fp32 sums of four add a few roundings of the largest term.
    bound = per_element(simulation, result.scales).astype(np.float64).sum(axis=0) * 0.5
    if average:
        bound /= ranks
    reduced = result.shards.reshape(-1)
    assert result.shards.dtype == np.float32
    assert result.shards.shape == (4, 96)
    assert np.all(np.abs(reduced - exact) <= bound * (1 + 1e-3))
    assert np.abs(reduced - exact).max() > 0


def test_the_sum_is_taken_in_rank_order_in_fp32():
    # 2^24 + 1 is no fp32 number: added first to last the small terms vanish, in another order they stay.
    gradients = np.zeros((3, 3 * 16), dtype=np.float32)
    gradients[:, 0] = [2.0**24, 1.0, 1.0]
    assert LoCoSimulation(3, 48, bits=2, block_size=16).step(gradients).shards[0, 0] == 2.0**24
    assert LoCoSimulation(3, 48, bits=2, block_size=16).step(gradients[::-1]).shards[0, 0] == 2.0**24 + 2


# --- what is remembered ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_classic_error_feedback_telescopes(bits):
    """With beta = 0 and an exact error state nothing is lost: all that was sent, plus the last error."""
    numel = 2 * 64
    simulation = LoCoSimulation(2, numel, bits=bits, block_size=32, beta=0.0, error_dtype="fp32")
    total = np.zeros((2, numel))
    sent = np.zeros((2, numel))
    for step in range(50):
        gradients = np.random.default_rng(seeded(step)).standard_normal((2, numel)).astype(np.float32)
        total += gradients
        result = simulation.step(gradients)
        sent += result.sent
    # What is left is the fp32 rounding of g + e and of h - s*q.
    assert np.allclose(sent + result.errors, total, rtol=0, atol=50 * 2**-20)
    assert np.abs(result.errors).max() > 1e-3


@pytest.mark.parametrize("error_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.8])
def test_error_is_the_moving_average_where_beta_weighs_the_old_one(beta, error_dtype):
    simulation = LoCoSimulation(1, 64, bits=2, block_size=16, beta=beta, error_dtype=error_dtype)
    previous = np.zeros((1, 64))
    for step in range(6):
        gradients = np.random.default_rng(seeded(step)).standard_normal((1, 64)).astype(np.float32)
        result = simulation.step(gradients)
        target = beta * previous + (1 - beta) * (gradients + previous - result.sent)
        largest = np.abs(target.reshape(4, 16)).max(axis=1).repeat(16)
        # Half a step of the 8-bit scale (up to 2^-7 above a/127), half a bf16 ulp, or fp32 rounding.
        slack = {"int8": largest / 127 * 0.5 * (1 + 2**-7), "bf16": np.abs(target[0]) * 2.0**-8, "fp32": 0}
        assert np.all(np.abs(result.errors - target)[0] <= slack[error_dtype] + 1e-6)
        if error_dtype == "bf16":
            assert set(np.abs(result.errors[0])) <= set(ALL_BF16)
        previous = result.errors


def test_the_energy_of_what_arrives():
    """Levels are the means of what is rounded to them, so h loses r's energy, a share D of its own. An e of
    independent r has (1 - beta) / (1 + beta) of it, k, so (1 - D) / (1 - k * D) of independent gradients'
    energy arrives: all of it with error feedback, less with LoCo, and 1 - D of it without an error. An error
    of gradients that are the same in every step adds energy."""
    random = np.random.default_rng(seeded(8))
    same = random.standard_normal((1, 128 * 64))

    def arrived(signal: float = 0.0, **settings: Any) -> float:
        simulation = Simulation(1, 128 * 64, bits=2, reset_interval=0, **settings)
        energy = np.zeros(2)
        for step in range(60):
            gradients = (signal * same + random.standard_normal((1, 128 * 64))).astype(np.float32)
            sent = simulation.step(gradients).sent
            if step >= 20:
                energy += [(sent**2).sum(), (gradients.astype(np.float64) ** 2).sum()]
        return float(energy[0] / energy[1])

    lost = 1 - arrived(memory=False)
    # The best four levels lose 0.1175 of normal numbers (Max, 1960); rounding scales up adds at most 2^-6.
    assert 0.1175 - 2.0**-6 < lost < 0.12
    for beta in (0.0, 0.5, 0.8):
        share = (1 - beta) / (1 + beta)
        assert arrived(beta=beta) == pytest.approx((1 - lost) / (1 - share * lost), abs=0.1 * lost)
        assert arrived(signal=2.0, beta=beta) > 1 + lost / 2


# --- numbers at the edge ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_nan_is_sent_as_nan_and_its_error_kept(bits, bad):
    simulation = LoCoSimulation(2, 2 * 48, bits=bits, block_size=16)
    good = gradients_like_training(2, 96)
    before = simulation.step(good).errors
    gradients = good.copy()
    gradients[1, 48 + 20] = bad  # rank 1, shard 1, block 1
    result = simulation.step(gradients)
    hit = np.zeros((2, 96), dtype=bool)
    hit[1, 48 + 16 : 48 + 32] = True
    assert np.array_equal(np.isnan(result.sent), hit)
    assert np.isnan(result.scales[1, 1, 1])
    assert np.count_nonzero(np.isnan(result.scales)) == 1
    assert np.array_equal(np.isnan(result.shards).reshape(-1), hit[1])
    assert np.array_equal(result.errors[hit], before[hit])
    assert before[hit].any()
    assert not np.array_equal(result.errors[~hit], before[~hit])
    # The next good step is finite again.
    assert np.all(np.isfinite(simulation.step(good).shards))
