"""The Triton kernels compiled for a GPU, without one. Their bits: test_backends.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Of 16 elements, 4 energies; sums and quotients that are exact or rounded once, and no other product.
_OF_ENERGIES = 4 * 16 * 3 // 4 + 4
FUSED = {
    "compress-4": 16 + 2 * (16 + 1) + 16 + _OF_ENERGIES,  # h, two quotients and their inverses, r
    "compress-1": 16 + (16 + 1) + 16 + _OF_ENERGIES,  # a sign is no quotient
    "decompress": 32 * (4 + 1),  # 4 senders in one round, and 1 where less are left
}
MOST = {"compress-4": 42, "odd": 53, "compress-1": 46, "decompress": 4}
"""Instructions for an element, of one sender; `odd` are shards that begin anywhere."""
MOST_OF_ROWS = {"compress-4": 66, "decompress": 4.5}
"""Of blocks that begin anywhere."""
READ_WEIGHTS = ("count", "place", "apply", "sums")
MOST_OF_WEIGHTS = {
    "aligned": {"count": 64, "place": 162, "pack": 20, "apply": 177, "sums": 19, "sizes": 14, "verdict": 8},
    "odd": {"count": 96, "place": 168, "pack": 20, "apply": 298, "sums": 35, "sizes": 14, "verdict": 8},
}
"""For a weight, of the weight code's kernels: on all branches, which no tile takes all."""


def test_they_compile_for_a_hopper_gpu_in_few_instructions():
    script = Path(__file__).with_name("compile_for_gpu.py")
    sources = script.parents[1:3]  # these, whatever is installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 7 + 4 + 2 * 7
    for line in lines:
        name, *fields = line.split()
        found = {key: float(value) for key, value in (field.split("=") for field in fields)}
        assert found["stack"] == 0, line
        if name.startswith("weights"):
            _, kernel, where = name.split("-")
            assert found["instructions"] < MOST_OF_WEIGHTS[where][kernel], line
            assert (found["wide"] > 0) == (where == "aligned" and kernel in READ_WEIGHTS), line
            continue
        kernel = "decompress" if name.startswith("decompress") else f"compress-{name.split('-')[2]}"
        assert found["fused"] == FUSED[kernel], line
        # What an H100 has time for is in docs/performance.md.
        if name.endswith("rows"):
            assert found["instructions"] < MOST_OF_ROWS[kernel], line
            continue
        most = MOST["odd" if "odd" in name else kernel]
        assert found["instructions"] < most, line
        if "odd" not in name:
            assert found["wide"] > 0, line
