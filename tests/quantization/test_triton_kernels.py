"""The Triton kernels without a GPU: the reference's bits in the interpreter, and compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.kernel_agreement import (
    BITS,
    COMPRESS,
    DECOMPRESS,
    check_compress,
    check_decompress_reduce,
)

from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.layout import BlockLayout

CPU = torch.device("cpu")
BLOCKS = st.sampled_from([16, 64, 128, 1024])


def shapes() -> st.SearchStrategy[tuple[int, int]]:
    """(elements, shards): any, and some whose blocks all have a multiple of 16."""
    return st.one_of(
        st.tuples(st.integers(1, 2500), st.integers(1, 5)),
        st.sampled_from([(1024, 1), (4096, 4), (2048, 2), (3120, 3)]),
    )


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@given(
    shape=shapes(),
    bits=BITS,
    block_size=BLOCKS,
    **COMPRESS,
)
@settings(max_examples=40, deadline=None)
def test_codes_scales_and_errors_are_the_reference_s_bits(shape, bits, block_size, **options):
    check_compress(triton_kernels, BlockLayout.of(*shape, bits, block_size), device=CPU, **options)


@given(
    size=st.integers(1, 1500),
    bits=BITS,
    block_size=BLOCKS,
    **DECOMPRESS,
)
@settings(max_examples=40, deadline=None)
def test_the_reduced_shard_is_the_reference_s_bits(size, bits, block_size, **options):
    layout = BlockLayout.of(size, 1, bits, block_size)
    check_decompress_reduce(triton_kernels, layout, device=CPU, **options)


def test_one_scale_for_a_shard_is_left_to_the_reference():
    assert triton_kernels.supports(BlockLayout.of(10_000, 2, 4, 128))
    assert not triton_kernels.supports(BlockLayout.of(10_000, 2, 4, "shard"))
    assert not triton_kernels.supports(BlockLayout.of(2 * 8192, 2, 4, 8192))


# Of 16 elements, 4 energies; sums and quotients that are exact or rounded once, and no other product.
_OF_ENERGIES = 4 * 16 * 3 // 4 + 4
FUSED = {
    "compress-4": 16 + 2 * (16 + 1) + 16 + _OF_ENERGIES,  # h, two quotients and their inverses, r
    "compress-1": 16 + (16 + 1) + 16 + _OF_ENERGIES,  # a sign is no quotient
    "decompress": 32 * (4 + 1),  # 4 senders in one round, and 1 where less are left
}
MOST = {"compress-4": 42, "odd": 53, "compress-1": 46, "decompress": 4}
"""Instructions for an element, of one sender; `odd` are shards that begin anywhere."""


def test_they_compile_for_a_hopper_gpu_in_few_instructions():
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
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
    assert len(lines) == 7
    for line in lines:
        name, *fields = line.split()
        found = {key: float(value) for key, value in (field.split("=") for field in fields)}
        assert found["stack"] == 0, line
        kernel = "decompress" if name.startswith("decompress") else f"compress-{name.split('-')[2]}"
        assert found["fused"] == FUSED[kernel], line
        # What an H100 has time for is in docs/performance.md.
        most = MOST["odd" if "odd" in name else kernel]
        assert found["instructions"] < most, line
        if "odd" not in name:
            assert found["wide"] > 0, line
