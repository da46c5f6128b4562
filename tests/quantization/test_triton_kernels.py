"""The Triton kernels compiled for a GPU, without one. Their bits: test_backends.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from not_interpreted import output_of, wheel_of_triton

# 16 elements have 4 energies; sums and quotients are exact or rounded once, and there is no other product.
_OF_ENERGIES = 4 * 16 * 3 // 4 + 4
FUSED = {
    "compress-4": 16 + 2 * (16 + 1) + 16 + _OF_ENERGIES,  # h, two quotients and their inverses, r
    "compress-1": 16 + (16 + 1) + 16 + _OF_ENERGIES,  # a sign is no quotient
    "decompress": 32 * (4 + 1),  # 4 senders in one round, and 1 where less are left
}
FUSED["compress-1"] += 4  # the mean of magnitudes
# Levels of rotated blocks: h, the error's quotient, r; three stages between threads; whole numbers, their
# squares' sum and its root; the polynomial of a level.
_OF_LEVELS = 16 + (16 + 1) + 16 + _OF_ENERGIES + 3 * 16 + 16 + 12 + 5
for _bits, _of_level in ((4, 3), (2, 1)):
    FUSED[f"compress-levels{_bits}"] = _OF_LEVELS + _of_level * 16
    FUSED[f"decompress-levels{_bits}"] = 32 * (4 + 1) * (1 + _of_level) + 2 * 32
FUSED["compress-unlogged4"] = FUSED["compress-levels4"] - _OF_ENERGIES
MOST = {
    "compress-4": 45,
    "compress-1": 48.5,
    "decompress": 4,
    "compress-levels4": 77.5,
    "compress-levels2": 62.5,
    "compress-unlogged4": 66.5,
    "decompress-levels4": 8.3,
    "decompress-levels2": 4.8,
}
"""Instructions for an element, of one sender."""
MOST_OF_ODD = {"compress-4": 58}
"""The same of shards that begin anywhere."""
MOST_OF_SHORT = {"compress-levels4": 85, "compress-levels2": 72}
"""Where shards end with a block that is not whole."""
MOST_OF_ROWS = {"compress-4": 47, "decompress": 4.5, "compress-levels4": 85, "decompress-levels4": 9}
MOST_OF_ROWS["compress-unlogged4"] = 77
"""Where rows do."""
MOST_REGISTERS = {"compress-fp32-levels4-rows": 184, "compress-fp32-unlogged4-rows": 128}
"""Registers of a thread: a multiprocessor has room for two and for four programs."""
READ_TILES = ("count", "sums")
MOST_OF_WEIGHTS = {
    "aligned": {"count": 94, "encode": 136, "pack": 11, "decode": 103, "sums": 26},
    "odd": {"count": 98, "encode": 136, "pack": 11, "decode": 103, "sums": 28},
}
"""For a weight, of the weight code's kernels that see weights. A message's tables take the others."""


@pytest.mark.slow
def test_they_compile_for_a_hopper_gpu_in_few_instructions():
    lines = output_of(Path(__file__).with_name("compile_for_gpu.py"), seconds=900).splitlines()
    assert len(lines) == 7 + 4 + 2 * 3 + 2 + 4 + 2 * 11
    for line in lines:
        name, *fields = line.split()
        found = {key: float(value) for key, value in (field.split("=") for field in fields)}
        assert found["stack"] == 0, line
        assert found["narrow"] == 0, line
        if name.startswith("weights"):
            _, kernel, where = name.split("-")
            assert found["instructions"] < MOST_OF_WEIGHTS[where].get(kernel, 800), line
            if kernel in READ_TILES:
                assert (found["wide"] > 0) == (where == "aligned"), line
            continue
        kernel, where = _kernel_of(name)
        levels = name.startswith("compress") and ("levels" in name or "unlogged" in name)
        of_mean = 4 if levels and where != "aligned" else 0  # over blocks of unlike lengths
        assert found["fused"] == FUSED[kernel] + of_mean, line
        prefetches = name.startswith("compress") and where != "odd"
        assert found["buffers"] == (2 if prefetches else 0), line
        # What an H100 has time for is in docs/benchmarks.md.
        most = {"odd": MOST_OF_ODD, "rows": MOST_OF_ROWS, "short": MOST_OF_SHORT}.get(where, MOST)
        assert found["instructions"] < most[kernel], line
        if name in MOST_REGISTERS:
            assert found["registers"] <= MOST_REGISTERS[name], line
        if prefetches or where not in ("odd", "rows"):
            assert found["wide"] > 0, line


@pytest.mark.slow
@pytest.mark.parametrize("release", [None, "3.4.0", "3.5.1", "3.6.0"])
def test_they_compile_for_every_gpu_with_every_triton(release):
    """For an A100, an H100, a B200 and a desktop's Blackwell; None is the installed Triton."""
    first = None if release is None else wheel_of_triton(release)
    script, capabilities = Path(__file__).with_name("compile_for_gpu.py"), ("80", "90", "100", "120")
    lines = output_of(script, *capabilities, seconds=900, first=first).splitlines()
    assert len(lines) == len(capabilities) * (9 + 11 + 1)
    spilled = [line for line in lines if "levels" in line and not line.endswith("stack=0")]
    assert spilled == []


def _kernel_of(name: str) -> tuple[str, str]:
    """compress-fp32-4-aligned -> (compress-4, aligned), decompress-fp32 -> (decompress, "")."""
    kernel, _, *rest = name.split("-")
    if kernel == "compress" or (rest and "levels" in rest[0]):
        kernel += f"-{rest.pop(0)}"
    return kernel, rest[0] if rest else ""
