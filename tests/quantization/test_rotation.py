"""Rotating a block: energy stays, blocks stay apart, and the bits are those of the simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import codes as simulated

from megatron_patch.quantization.blocks import Span
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


@pytest.mark.parametrize("length", [1, 2, 16, 96, 100, 127, 128])
def test_a_rotation_keeps_angles_and_energy(length):
    layout = BlockLayout.of(length, 1, 4, 128)
    a, b = (layout.cut(normal(length, seed=seed)).double() for seed in (1, 2))
    turned = [rotate(x.float(), layout).double() for x in (a, b)]
    assert torch.allclose((turned[0] * turned[1]).sum(), (a * b).sum(), atol=1e-4)
    assert torch.allclose(turned[0].square().sum(), a.square().sum(), rtol=1e-6)


def test_one_large_number_is_spread_over_its_block_and_no_further():
    layout = BlockLayout.of(3 * 96, 1, 4, 128, spans=[Span.of(0, (3, 96))])
    values = torch.zeros(3 * 96)
    values[96 + 70] = 1.0  # in the second part, of 32, of the second row
    turned = layout.flat(rotate(layout.cut(values), layout))
    part = slice(96 + 64, 96 + 96)
    assert torch.allclose(turned[part].abs(), torch.full((32,), 32**-0.5))
    turned[part] = 0
    assert not turned.any()


def test_zeros_stay_zeros_and_what_is_not_finite_reaches_its_part():
    layout = BlockLayout.of(256, 2, 4, 64)
    assert not rotate(torch.zeros(2, 2, 64), layout).any()
    values = normal(256)
    values[70] = torch.inf
    turned = rotate(layout.cut(values), layout)
    assert not turned[0, 1].isfinite().any()
    assert turned[0, 0].isfinite().all()
    assert turned[1].isfinite().all()


def test_hops_rotate_at_the_first_and_back_at_the_last():
    hops = [HADAMARD.hop(first=True), HADAMARD.hop(), HADAMARD.hop(last=True)]
    assert [hop.sender for hop in hops] == [True, False, False]
    assert [hop.owner for hop in hops] == [False, False, True]
    assert HADAMARD.hop(first=True, last=True) == HADAMARD
    assert all(HADAMARD.hop(first, last).rotated for first in (True, False) for last in (True, False))
    assert NONE.hop(first=True, last=True) == NONE
