"""Launches of GPU kernels in a step: a bound for every method, and for 1-bit Adam of a model with 7 billion
parameters."""

from __future__ import annotations

import re
from pathlib import Path

from not_interpreted import output_of

MOST = 64
"""Launches of a bucket's exchange."""
BUCKETS, GROUPS = 108, 2
"""A LLaMA with 7 billion parameters in Megatron's buckets, and its groups with and without weight decay."""
OTHERS = 12
"""1-bit Adam's launches in a step: tables that are copied, sums of partial sketches, and the norm itself."""
FORM = 2


def test_exchanges_and_1_bit_adam_launch_few_kernels() -> None:
    printed = output_of(Path(__file__).with_name("launches.py"), seconds=450)
    found = {name: int(count) for name, count in re.findall(r"(.*) launches=(\d+)", printed)}
    assert len(found) == 2 * 4 + 2 + 4 + 2
    assert found["weights from 2 ranks"] == found["weights from 16 ranks"], found
    assert max(found.values()) <= MOST, found
    assert found["onebit_adam step of 3"] == found["onebit_adam step of 30"]  # not one for each parameter
    step = GROUPS * found["onebit_adam step of 30"] + OTHERS
    assert BUCKETS * (found["onebit_adam flat all-reduce"] + FORM) + step < 1500, found
