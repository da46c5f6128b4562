"""The comparison itself: a tie explains the other decision and nothing else, and all else must agree.

The "ranks" here are a second simulation whose gradients are off in their last bits, as is a node's sum that
was added in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seeds import seeded

from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation, StepResult
from simulation.onebit_adam_float64 import one_bit

BLOCK = 16


def block_of(*first: float, rest: float = 0.0) -> np.ndarray:
    """[1, 2 * BLOCK]: two blocks; `first` and then `rest` in the first of them, ones in the other."""
    values = np.ones((1, 2 * BLOCK), dtype=np.float32)
    values[0, :BLOCK] = rest
    values[0, : len(first)] = first
    return values


# What the ranks' gradients are off by, and where: (options, gradients, {element: shift}).
SENT: dict[str, tuple[dict[str, Any], np.ndarray, dict[int, float]]] = {
    # 7 makes the scale 1. Further from the half than NEAR_TIE, which needs no slack.
    "code": ({"bits": 4}, block_of(7, 2.5001), {1: -2e-4}),
    "code of a negative element": ({"bits": 4}, block_of(7, -3.4999), {1: -2e-4}),
    "scale of the largest": ({"bits": 4}, block_of(7, 1.2, 3.3, -5.7), {0: 2e-6}),
    "scale of the largest, 2 bits": ({"bits": 2}, block_of(1, 0.7, -0.2), {0: 2e-7}),
    "scale of the mean": ({"bits": 1}, block_of(3, rest=-3), {0: 2e-5}),
    "sign": ({"bits": 1}, block_of(1e-9, rest=1), {0: -2e-9}),
}
# With beta 0 what is remembered is h - s*q. 127 * 2^-9 makes the error's scale 2^-9.
ERRORS: dict[str, tuple[dict[str, Any], np.ndarray, dict[int, float]]] = {
    "error's code": ({}, block_of(7, 127 * 2**-9, 10.5 * 2**-9), {2: 2e-6}),
    "error's code beside a large gradient": ({}, block_of(7, 127 * 2**-9, 3 - 9.5 * 2**-9), {2: 2e-6}),
    "error's scale": ({}, block_of(7, 127 * 2**-9, 3 + 10.2 * 2**-9), {1: 2e-6}),
    "error in bf16": ({"error_dtype": "bf16"}, block_of(7, 0.25 + 2**-10), {1: 2e-6}),
}


def simulation_of(options: dict[str, Any], ranks: int = 1) -> LoCoSimulation:
    options = {"bits": 4, "beta": 0.0, "block_size": BLOCK, **options}
    options = {"codec": "uniform" if options["bits"] > 1 else "sign", **options}
    return LoCoSimulation(ranks, 2 * BLOCK, **options)


def shifted(gradients: np.ndarray, shifts: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """The ranks' gradients, and how far they may be from ours."""
    real, slack = gradients.copy(), np.zeros(gradients.shape)
    for element, shift in shifts.items():
        real[0, element] += np.float32(shift)
        slack[0, element] = 1.1 * abs(shift)
    return real, slack


def check(
    case: tuple[dict[str, Any], np.ndarray, dict[int, float]],
    *,
    slack: bool = True,
    changes: dict[str, np.ndarray] | None = None,
    forks: float = 0.5,
) -> tuple[Agreement, StepResult, StepResult]:
    """Compare one step of the ranks, with `changes` of what they sent or remember; also both results."""
    options, gradients, shifts = case
    real_gradients, of_sum = shifted(gradients, shifts)
    real = simulation_of(options).step(real_gradients)
    held = {name: getattr(real, name).astype(np.float32) for name in ("sent", "errors")} | (changes or {})
    agreement = Agreement(simulation_of(options), forks)
    return agreement, agreement.check(gradients, slack=of_sum if slack else None, **held), real


@pytest.mark.parametrize("name", SENT)
def test_a_tie_of_what_is_sent_is_explained_and_forks_its_block(name):
    agreement, wanted, real = check(SENT[name])
    assert not np.array_equal(wanted.sent, real.sent), "the case decides nothing"
    assert agreement.forked[0, :BLOCK].all()
    assert not agreement.forked[0, BLOCK:].any()


@pytest.mark.parametrize("name", ERRORS)
def test_a_tie_of_the_error_is_explained_and_forks_its_block(name):
    agreement, wanted, real = check(ERRORS[name])
    assert np.array_equal(wanted.sent, real.sent)
    assert not np.array_equal(wanted.errors, real.errors), "the case decides nothing"
    assert agreement.forked[0, :BLOCK].all()
    assert not agreement.forked[0, BLOCK:].any()


@pytest.mark.parametrize("name", [*SENT, *ERRORS])
def test_the_same_difference_without_a_tie_is_caught(name):
    with pytest.raises(AssertionError, match="sent" if name in SENT else "error"):
        check({**SENT, **ERRORS}[name], slack=False)


@pytest.mark.parametrize("name", [*SENT, *ERRORS])
def test_twice_the_difference_is_caught_at_a_tie(name):
    """Two codes off, or a scale that is two bf16 numbers off."""
    case, what = {**SENT, **ERRORS}[name], "sent" if name in SENT else "errors"
    _, wanted, real = check(case)
    twice = getattr(real, what) + (getattr(real, what) - getattr(wanted, what))
    with pytest.raises(AssertionError, match=what.removesuffix("s")):
        check(case, changes={what: twice.astype(np.float32)})


@pytest.mark.parametrize("name", [*SENT, *ERRORS])
def test_a_difference_beside_the_tie_is_caught(name):
    """One step off in another element of the same block, and in another block."""
    case, what = {**SENT, **ERRORS}[name], "sent" if name in SENT else "errors"
    _, _, real = check(case)
    step = np.abs(getattr(real, what)[0, :BLOCK]).max() / 127
    for element in (BLOCK - 1, 2 * BLOCK - 1):
        beside = getattr(real, what).astype(np.float32)
        beside[0, element] += np.float32(step)
        with pytest.raises(AssertionError, match=what.removesuffix("s")):
            check(case, changes={what: beside})


@pytest.mark.parametrize("name", ["scale of the largest", "scale of the mean", "error's scale"])
def test_a_block_has_one_scale(name):
    case, what = {**SENT, **ERRORS}[name], "sent" if name in SENT else "errors"
    _, wanted, real = check(case)
    mixed = getattr(real, what).astype(np.float32)
    mixed[0, 0:2] = getattr(wanted, what)[0, 0:2]
    changed = mixed[0, :BLOCK] != getattr(real, what)[0, :BLOCK]
    assert changed.any()
    with pytest.raises(AssertionError, match=what.removesuffix("s")):
        check(case, changes={what: mixed})


@pytest.mark.parametrize("name", [*SENT, *ERRORS])
def test_too_many_forks_are_caught(name):
    with pytest.raises(AssertionError, match=r"50\.0% of the elements forked"):
        check({**SENT, **ERRORS}[name], forks=0.4)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_nobody_shows_may_have_forked(name):
    options, gradients, shifts = ERRORS[name]
    real, slack = shifted(gradients, shifts)
    agreement = Agreement(simulation_of(options), forks=0.5)
    sent = simulation_of(options).step(real).sent.astype(np.float32)
    agreement.check(gradients, slack=slack, sent=sent)
    assert agreement.forked[0, :BLOCK].all()


def test_a_forked_block_is_compared_again_after_a_reset():
    options, gradients, shifts = SENT["code"]
    options = {**options, "reset_interval": 2}
    agreement, ranks = Agreement(simulation_of(options), forks=0.5), simulation_of(options)
    real_gradients, slack = shifted(gradients, shifts)
    for _ in range(2):
        real = ranks.step(real_gradients)
        agreement.check(
            gradients, slack=slack, sent=real.sent.astype(np.float32), errors=real.errors.astype(np.float32)
        )
    assert not agreement.forked.any()
    wrong = ranks.step(real_gradients).sent.astype(np.float32)
    wrong[0, 5] += 1
    with pytest.raises(AssertionError, match="sent"):
        agreement.check(gradients, slack=slack, sent=wrong)


def test_ties_of_an_error_follow_the_loss_scale_and_end_with_a_block_that_is_not_sent():
    options, gradients, shifts = ERRORS["error's code"]
    real_gradients, slack = shifted(gradients, shifts)
    agreement, ranks = Agreement(simulation_of(options), forks=0.5), simulation_of(options)
    for simulated in (agreement, ranks):
        simulated.exchange(real_gradients if simulated is ranks else gradients)
    # The comparison's own simulation again, with what it may be off by.
    agreement = Agreement(simulation_of(options), forks=0.5)
    agreement.exchange(gradients, slack=slack)
    ranks.end_step(loss_scale_factor=4.0)
    agreement.end_step(errors=ranks.errors().astype(np.float32), loss_scale_factor=4.0)
    assert agreement.forked.any()

    ranks = simulation_of(options)
    ranks.exchange(gradients, slack)
    assert ranks.error_ties().flags.any()
    ranks.exchange(np.full_like(gradients, np.nan), slack)
    assert not ranks.error_ties().flags.any()


def test_what_owners_reduce_is_never_a_tie():
    """Sums of s*q are sums of equal numbers in one order: bf16 rounds them alike."""
    options, gradients, shifts = ERRORS["error's code"]
    real, slack = shifted(gradients, shifts)
    reduced = simulation_of({**options, "gradient_dtype": "fp32", "reduced_dtype": "bf16"}).step(real).shards
    for off in (0.0, 2.0**-6):
        agreement = Agreement(simulation_of({**options, "reduced_dtype": "bf16"}), forks=0.5)
        shards = reduced + np.float32(off) * (reduced == 7)
        if off:
            with pytest.raises(AssertionError, match="shard"):
                agreement.check(gradients, slack=slack, shards=shards)
        else:
            agreement.check(gradients, slack=slack, shards=shards)


def test_fp32_errors_keep_last_bits_so_they_refuse_slack():
    with pytest.raises(ValueError, match="fp32 errors"):
        simulation_of({"error_dtype": "fp32"}).exchange(block_of(7), np.full((1, 2 * BLOCK), 1e-6))


@pytest.mark.parametrize(("error_dtype", "ulps"), [("int8", 16), ("bf16", 2)])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_flags_are_enough_and_few(bits, error_dtype, ulps):
    """Random gradients off by up to some ulps: nothing is left unexplained, and little forks."""
    ranks, numel = 3, 3 * 400
    options = {"bits": bits, "block_size": BLOCK, "error_dtype": error_dtype, "reset_interval": 2}
    ours, theirs = (LoCoSimulation(ranks, numel, **options) for _ in range(2))
    agreement = Agreement(ours, forks=0.3)
    random = np.random.default_rng(seeded(bits))
    differences = 0
    for _ in range(30):
        size = np.exp(random.uniform(-8, 0, size=numel))
        gradients = (random.standard_normal((ranks, numel)) * size).astype(np.float32)
        slack = ulps * 2.0**-23 * np.abs(gradients).astype(np.float64)
        real = (gradients + random.uniform(-0.9, 0.9, size=slack.shape) * slack).astype(np.float32)
        result = theirs.step(real)
        wanted = agreement.check(
            gradients,
            slack=slack,
            sent=result.sent.astype(np.float32),
            errors=result.errors.astype(np.float32),
        )
        differences += np.sum(wanted.errors != result.errors) + np.sum(wanted.sent != result.sent)
    assert differences


@pytest.mark.parametrize(
    ("first", "undecided"),
    [
        (0.5, [False, False]),
        (1e-9, [True, False]),  # a sign
        (0.0, [False, False]),  # exactly
        (1.0 + 1e-6, [True, False]),  # the mean is just above 1, a bf16 number
        (1.0 + 1e-3, [False, False]),
    ],
)
def test_one_bit_adam_s_blocks_are_undecided_where_a_sign_or_a_mean_is_a_tie(first, undecided):
    values = np.where(np.arange(2 * BLOCK) % 2, 1.003, -1.003)
    if first > 1:
        values[:BLOCK] = np.sign(values[:BLOCK])
    values[0] = first
    _, found = one_bit(values, [slice(0, BLOCK), slice(BLOCK, 2 * BLOCK)])
    assert found.reshape(2, BLOCK).all(axis=1).tolist() == undecided
    assert found.reshape(2, BLOCK).any(axis=1).tolist() == undecided
