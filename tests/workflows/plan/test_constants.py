"""Constants have sources, and the exact gather's bits follow what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.workflows.plan.constants import CONSTANTS, EXACT_BITS, GPUS, exact_bits


def test_every_number_has_a_unit_a_kind_and_a_source() -> None:
    for name, one in CONSTANTS.items():
        assert one.value > 0, name
        assert one.kind in ("data sheet", "measured", "paper", "computed", "assumed"), name
        assert one.unit, name
        assert len(one.source) > 10, name
    assert all(gpu.name == name for name, gpu in GPUS.items())


def test_measured_bits_come_back() -> None:
    for ratio, bits in EXACT_BITS:
        assert exact_bits(ratio) == pytest.approx(bits)


@given(st.floats(0, 10), st.floats(0, 10))
def test_bits_rise_with_the_learning_rate_and_stay_in_bounds(one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert 0 <= exact_bits(low) <= exact_bits(high) <= 16
