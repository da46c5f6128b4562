"""Launches of kernels that are at hand: the driver gets what Triton's own way would have brought it."""

from __future__ import annotations

import re
from pathlib import Path

from not_interpreted import output_of


def test_launches_are_triton_s_own() -> None:
    printed = output_of(Path(__file__).with_name("known_launches.py"), seconds=450)
    found = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", printed)}
    assert found["kernels"] > 50  # of so many a call may take the wrong one
    assert found["calls"] > 3 * found["kernels"]
    assert found["gradients"] == 2
    assert found["weights"] == 10
