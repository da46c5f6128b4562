"""The cut of a bucket into shards and blocks, and the size of what is sent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.quantization.layout import BlockLayout

BITS = st.sampled_from([8, 4, 2, 1])
BLOCKS = st.sampled_from([16, 32, 64, 128, 1024, "shard"])
SHARDS = st.integers(1, 8)
SIZES = st.integers(1, 700)


NUMELS = st.integers(1, 4000)


def blocks_by_hand(numel: int, shards: int, block_size: int | str) -> list[list[list[int]]]:
    """Positions in the bucket of the elements of each block of each shard; the last shards may lack some."""
    size = math.ceil(numel / shards)
    block = size if block_size == "shard" else int(block_size)
    return [
        [
            list(range(min(j * size + start, numel), min(j * size + min(start + block, size), numel)))
            for start in range(0, size, block)
        ]
        for j in range(shards)
    ]


@given(NUMELS, SHARDS, BITS, BLOCKS)
@settings(max_examples=80, deadline=None)
def test_no_block_crosses_a_shard_and_every_element_is_in_one(numel, shards, bits, block_size):
    layout = BlockLayout.of(numel, shards, bits, block_size)
    by_hand = blocks_by_hand(numel, shards, block_size)
    assert (layout.shards, layout.shard_size, layout.numel) == (shards, math.ceil(numel / shards), numel)
    assert layout.blocks == len(by_hand[0])
    assert sum(len(places) for blocks in by_hand for places in blocks) == numel

    # Elements are numbered from 1: a zero in the cut is fill.
    cut = layout.cut(torch.arange(1, numel + 1, dtype=torch.float64))
    assert cut.dtype == torch.float32
    assert cut.shape == (shards, layout.blocks, layout.block)
    for shard in range(shards):
        for index, places in enumerate(by_hand[shard]):
            row = cut[shard, index].tolist()
            assert row[: len(places)] == [place + 1 for place in places]
            assert not any(row[len(places) :])
        alone = layout.part(shard)
        assert alone.numel == sum(len(places) for places in by_hand[shard])
        assert (alone.shards, alone.payload_bytes) == (1, layout.payload_bytes)
    lengths = [[len(places) for places in blocks] for blocks in by_hand]
    assert layout.lengths(torch.device("cpu")).tolist() == lengths


@given(
    NUMELS, SHARDS, BITS, BLOCKS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])
)
@settings(max_examples=100, deadline=None)
def test_flat_and_join_undo_cut(numel, shards, bits, block_size, dtype):
    layout = BlockLayout.of(numel, shards, bits, block_size)
    values = torch.arange(numel).remainder(100).to(dtype)
    cut = layout.cut(values)
    assert torch.equal(layout.flat(cut), values.float())
    joined = layout.join(cut)
    assert joined.shape == (shards, layout.shard_size)
    assert torch.equal(joined.reshape(-1)[:numel], values.float())
    for shard, row in enumerate(joined):
        alone = layout.part(shard)
        assert torch.equal(alone.flat(alone.cut(row[: alone.numel])), row[: alone.numel])


@given(SHARDS, SIZES, BITS, BLOCKS)
@settings(max_examples=80, deadline=None)
def test_a_payload_is_codes_then_scales_each_aligned_to_16_bytes(shards, size, bits, block_size):
    layout = BlockLayout.of(shards * size, shards, bits, block_size)
    block = size if block_size == "shard" else block_size
    word = min(4, block * bits // 8) if block_size != "shard" else 4
    codes = size // block * (block * bits // 8) if block_size != "shard" else 0
    last = size % block if block_size != "shard" else size
    codes += math.ceil(last * bits / (8 * word)) * word  # of the last block whole words
    assert layout.code_bytes % 16 == 0
    assert layout.payload_bytes % 16 == 0
    assert codes <= layout.code_bytes < codes + 16
    assert layout.code_bytes + 2 * layout.blocks <= layout.payload_bytes
    assert layout.payload_bytes < layout.code_bytes + 2 * layout.blocks + 16


@pytest.mark.parametrize(
    ("bits", "block", "wanted"),
    [
        (8, 128, 8.125),
        (4, 128, 4.125),
        (2, 128, 2.125),
        (1, 128, 1.125),
        (4, 16, 5.0),
        (4, 1024, 4 + 1 / 64),
        (4, "shard", 4.0),
    ],
)
def test_bits_per_element_of_a_large_bucket(bits, block, wanted):
    layout = BlockLayout.of(4 * 2**21, 4, bits, block)
    assert 8 * layout.shards * layout.payload_bytes / layout.numel == pytest.approx(wanted, abs=1e-4)
