"""The simulated all-reduce and optimizer from first principles, and ragged cuts."""

from __future__ import annotations

import numpy as np
import pytest
from seeds import seeded

from simulation.all_reduce_float64 import AllReduceAgreement

RAGGED = [(1, 5), (3, 100), (4, 13), (4, 5), (4, 9), (2, 257)]


def gradients(ranks: int, numel: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng(seeded(step)).standard_normal((ranks, numel)).astype(np.float32)


@pytest.mark.parametrize(("ranks", "numel"), RAGGED)
@pytest.mark.parametrize("average", [False, True])
def test_all_ranks_get_the_sum_within_both_phases_steps(ranks, numel, average):
    agreement = AllReduceAgreement(ranks, numel, bits=8, codec="uniform", block_size=16, average=average)
    assert sum(owner.simulation.numel for owner in agreement.owners) == numel
    values = gradients(ranks, numel)
    reduced = agreement.exchange(values)
    exact = values.astype(np.float64).sum(axis=0) / (ranks if average else 1)
    # Each phase is off by half a scale: of each sender's largest, and then of the sum's largest.
    step = np.abs(values).max() / 127 * (1 + 2**-7) / 2
    bound = step * (1 if average else ranks) + (np.abs(exact).max() + step * ranks) / 127 * (1 + 2**-7) / 2
    assert np.abs(reduced - exact).max() <= bound
    assert np.abs(reduced - exact).max() > 0


def test_owners_remember_what_the_second_phase_lost():
    """With beta = 0 and exact errors both phases telescope: in all, nothing is lost but the last errors."""
    ranks, numel = 3, 100
    options = {"bits": 2, "codec": "uniform", "block_size": 16, "beta": 0.0, "error_dtype": "fp32"}
    agreement = AllReduceAgreement(ranks, numel, **options)
    total, received = np.zeros(numel), np.zeros(numel)
    for step in range(40):
        values = gradients(ranks, numel, step)
        total += values.astype(np.float64).sum(axis=0)
        received += agreement.exchange(values)
        agreement.end_step()
    left = agreement.senders.simulation.errors().sum(axis=0)
    left += np.concatenate([owner.simulation.errors()[0] for owner in agreement.owners])
    assert np.allclose(received + left, total, rtol=0, atol=1e-3)
    assert np.abs(received - total).max() > 0.1
