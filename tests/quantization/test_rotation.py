"""Rotating a block: energy stays, blocks stay apart, and the bits are those of the simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import codes as simulated

from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import HADAMARD, NONE, rotate, rotate_back, signs


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [16, 128, 1024])
def test_signs_are_the_simulation_s_and_about_as_often_plus_as_minus(block):
    found = signs(block)
    assert found.tolist() == simulated.signs(block).tolist()
    assert abs(found.sum()) <= 4 * block**0.5


@given(st.integers(1, 300), st.sampled_from([16, 64, 128]), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_length_is_rotated_as_in_the_simulation(size, block, seed):
    layout = BlockLayout.of(size, 1, 4, block)
    values = normal(size, seed=seed)
    turned = rotate(layout.cut(values), layout)
    flat = layout.flat(turned).numpy()
    back = layout.flat(rotate_back(turned, layout)).numpy()
    for start in range(0, size, block):
        here = slice(start, min(start + block, size))
        wanted = simulated.rotate(values[here].numpy())
        np.testing.assert_array_equal(flat[here], wanted)
        np.testing.assert_array_equal(back[here], simulated.rotate_back(wanted))
    np.testing.assert_allclose(back, values.numpy(), atol=1e-6 * float(values.abs().max()) * block**0.5)


def test_hops_rotate_at_the_first_and_back_at_the_last():
    hops = [HADAMARD.hop(first=True), HADAMARD.hop(), HADAMARD.hop(last=True)]
    assert [hop.sender for hop in hops] == [True, False, False]
    assert [hop.owner for hop in hops] == [False, False, True]
    assert HADAMARD.hop(first=True, last=True) == HADAMARD
    assert all(HADAMARD.hop(first, last).rotated for first in (True, False) for last in (True, False))
    assert NONE.hop(first=True, last=True) == NONE
