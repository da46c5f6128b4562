"""What runs on a GPU is what was compiled: the kernels' PTX, run on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from not_interpreted import output_of, wheel_of_triton

BUDGETS = {
    "levels float32": {"instructions": 5600, "cycles": 850, "shuffles": 240, "sectors": 1720},
    "levels bfloat16": {"instructions": 5750, "cycles": 470, "shuffles": 240, "sectors": 1460},
    "uniform float32": {"instructions": 3050, "cycles": 850, "shuffles": 30, "sectors": 1700},
    "uniform bfloat16": {"instructions": 3150, "cycles": 240, "shuffles": 30, "sectors": 1445},
}
"""What compress may cost for a tile of 2,048 elements with 8-bit errors: warp instructions of PTX, cycles of
shared memory, shuffles, and sectors of 32 bytes that are asked for: the gradient's are twice in fp32, and a
thousand are of the table of blocks, whose few lines the first-level cache has."""


def ran(*arguments: str, first: Path | None = None) -> dict[str, dict[str, int]]:
    """The lines that run_kernels.py prints, as {name: {number's name: number}}."""
    script = Path(__file__).with_name("run_kernels.py")
    printed = output_of(script, *arguments, seconds=1800, first=first)
    found = {}
    for line in printed.splitlines():
        name = re.split(r" \w+=", line)[0]
        found[name] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
    return found


def test_compiled_kernels_give_the_reference_s_bits() -> None:
    """In bounds, aligned, reading only what was written, with every barrier that they need."""
    found = ran("rounds", "1", "90")
    assert found["compress"]["rounds"] >= 6
    assert all(numbers["launches"] for numbers in found.values())
    assert set(found) == {
        "compress", "decompress_reduce", "tiny averages", "decompress", "weight code", "1-bit Adam",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "rounds"), [(90, 10), (80, 2), (100, 2)])
def test_compiled_kernels_give_the_reference_s_bits_many_times(capability: int, rounds: int) -> None:
    """On an H100, an A100, a B200."""
    assert ran("rounds", str(rounds), str(capability))["compress"]["rounds"] == 6 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("release", ["3.4.0", "3.5.1", "3.6.0"])
def test_kernels_that_other_tritons_compiled_give_the_reference_s_bits(release: str) -> None:
    """The releases of torch 2.8, 2.9, and 2.10 and 2.11."""
    found = ran("rounds", "2", "90", first=wheel_of_triton(release))
    assert found["compress"]["rounds"] == 12
    assert found["tiny averages"]["rounds"] == 4


def test_a_missing_barrier_or_wait_is_found() -> None:
    found = ran("mutants")
    assert sum(numbers["mutants"] for numbers in found.values()) >= 18
    assert all(numbers["survived"] == 0 for numbers in found.values()), found


def test_what_a_tile_costs_and_where_offsets_may_overflow() -> None:
    found = ran("budgets")
    for name, most in BUDGETS.items():
        costs = found.pop(name)
        assert {key: costs[key] for key in most if costs[key] > most[key]} == {}, (name, costs)
    assert len(found) == 3
    assert all(numbers == {"narrow": 0} for numbers in found.values()), found
