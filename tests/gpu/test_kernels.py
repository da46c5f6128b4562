"""The Triton kernels on a real GPU: the reference's bits there too. `make test-gpu` runs this."""

from __future__ import annotations

import os

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

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="no GPU is there"
)

GPU = torch.device("cuda")
BLOCKS = st.sampled_from([16, 64, 128, 1024, 4096])


@given(
    numel=st.integers(1, 300_000),
    shards=st.integers(1, 9),
    bits=BITS,
    block_size=BLOCKS,
    **COMPRESS,
)
@settings(max_examples=300, deadline=None)
def test_codes_scales_and_errors_are_the_reference_s_bits(numel, shards, bits, block_size, **options):
    check_compress(triton_kernels, BlockLayout.of(numel, shards, bits, block_size), device=GPU, **options)


@given(
    size=st.integers(1, 100_000),
    bits=BITS,
    block_size=BLOCKS,
    **DECOMPRESS,
)
@settings(max_examples=200, deadline=None)
def test_the_reduced_shard_is_the_reference_s_bits(size, bits, block_size, **options):
    layout = BlockLayout.of(size, 1, bits, block_size)
    check_decompress_reduce(triton_kernels, layout, device=GPU, **options)
