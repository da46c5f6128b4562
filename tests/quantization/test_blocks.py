"""Blocks that follow parameters: where they begin and end, in every cut and part of one; what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from coded_values import flat_error
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.backend_agreement import compress_by, random_spans, same, sender_of

from megatron_patch import loco
from megatron_patch.errors import UserError
from megatron_patch.quantization.blocks import BlockTable, Contents, Span
from megatron_patch.quantization.layout import BlockLayout

CPU = torch.device("cpu")
BITS = st.sampled_from([8, 4, 2, 1])
BLOCKS = st.sampled_from([16, 64, 128, 1024])
NUMELS = st.integers(1, 3000)
SHARDS = st.integers(1, 7)
SEEDS = st.integers(0, 10_000)


def blocks_by_hand(numel: int, shards: int, spans: tuple[Span, ...], block: int) -> list[list[list[int]]]:
    """Positions in the tensor of the elements of each block of each shard, element by element."""
    size = math.ceil(numel / shards)
    found: list[list[list[int]]] = [[] for _ in range(shards)]
    last = None
    for place in range(numel):
        owner = next((span for span in spans if span.start <= place < span.start + span.length), None)
        if owner is None:
            continue
        row, column = divmod(place - owner.start, owner.row)
        block_of_place = (place // size, owner.start, row, column // block)
        if block_of_place != last:
            found[place // size].append([])
        found[place // size][-1].append(place)
        last = block_of_place
    return found


def placed(layout: BlockLayout) -> list[list[list[int]]]:
    """The same of a layout: elements are numbered from 1, a zero is fill."""
    cut = layout.cut(torch.arange(1, layout.numel + 1, dtype=torch.float64))
    return [[[int(x) - 1 for x in block if x] for block in shard if block.any()] for shard in cut]


@given(NUMELS, SHARDS, BITS, BLOCKS, SEEDS)
@settings(max_examples=100, deadline=None)
def test_blocks_are_counted_from_every_row_and_cut_by_shards(numel, shards, bits, block, seed):
    spans = random_spans(numel, seed)
    layout = BlockLayout.of(numel, shards, bits, block, spans=spans)
    by_hand = blocks_by_hand(numel, shards, spans, block)
    assert placed(layout) == by_hand
    assert layout.blocks == max(1, *map(len, by_hand))
    lengths = layout.lengths(CPU)
    for shard in range(shards):
        assert [n for n in lengths[shard].tolist() if n] == [len(one) for one in by_hand[shard]]
        alone, first = layout.part(shard), shard * layout.shard_size
        assert alone.numel == min(max(numel - first, 0), layout.shard_size)
        assert [[place + first for place in one] for one in placed(alone)[0]] == by_hand[shard]
        assert alone.payload_bytes == layout.payload_bytes


@given(NUMELS, st.integers(0, 2000), SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_part_of_a_tensor_has_its_blocks(numel, start, seed):
    """A shard that optimizer instances reduce: cut by its ends, but counted as in the bucket."""
    start %= numel
    length = max((numel - start) // 2, 1)
    whole = Contents(numel, random_spans(numel, seed))
    part = whole.part(start, length)
    by_hand = blocks_by_hand(start + length, 1, whole.spans, 64)[0]
    wanted = [[place - start for place in one if place >= start] for one in by_hand]
    table = BlockTable.of(part.spans, [[(0, length)]], 64, 4)
    layout = BlockLayout(length, 1, length, 4, 64, table)
    assert placed(layout)[0] == [one for one in wanted if one]
    assert Contents(numel).part(start, length) == Contents(length)


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((7, 160), 160),
        ((4, 3, 50), 150),
        ((1000,), 1000),
        ((9, 15), 135),
        ((9, 16), 16),
        ((), 1),
        ((3, 0), 1),
    ],
)
def test_rows_are_what_the_first_axis_counts(shape, row):
    span = Span.of(3, shape)
    assert (span.start, span.length, span.row) == (3, math.prod(shape), row)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("row", [96, 128, 160, 2880])
def test_a_row_without_a_gradient_is_sent_as_zeros(bits, row):
    """Whatever its neighbours are, and at 1 bit too, which has no code for zero."""
    shape, shards = (12, row), 5
    spans = [Span.of(0, (37,)), Span.of(64, shape), Span.of(64 + 12 * row, (100,))]
    numel = 64 + 12 * row + 128
    layout = BlockLayout.of(numel, shards, bits, 128, spans=spans)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(row))
    gradient[37:64] = gradient[-28:] = 0
    rows = gradient[64 : 64 + 12 * row].view(shape)
    unused = [0, 3, 4, 11]
    rows[unused] = 0
    sender = sender_of(layout, CPU, "int8", 0.8)
    payload = torch.empty(shards, layout.payload_bytes, dtype=torch.uint8)
    for _ in range(3):
        compress_by(loco, sender, gradient, payload)
        sent = layout.flat(sender.codec.decode(payload, layout))
        for values in (sent, flat_error(sender.error)):
            assert not values[64 : 64 + 12 * row].view(shape)[unused].any()
            assert not values[37:64].any()
            assert not values[-28:].any()
        assert (sent[64 : 64 + 12 * row].view(shape)[1] != 0).any()


def test_what_is_in_no_block_is_not_sent():
    """Not even where it is not zero; errors of it stay zero."""
    spans = [Span.of(5, (100,)), Span.of(130, (3, 40))]
    layout = BlockLayout.of(300, 2, 4, 16, spans=spans)
    gradient = torch.full((300,), 7.0)
    inside = torch.zeros(300, dtype=torch.bool)
    inside[5:105] = inside[130:250] = True
    gradient[~inside] = torch.nan
    sender = sender_of(layout, CPU, "fp32", 0.0, codec="uniform")
    payload = torch.empty(2, layout.payload_bytes, dtype=torch.uint8)
    compress_by(loco, sender, gradient, payload)
    sent = layout.flat(sender.codec.decode(payload, layout))
    assert torch.equal(sent, torch.where(inside, gradient, 0.0))
    assert not flat_error(sender.error)[~inside].any()
    again = torch.empty_like(payload)
    other = sender_of(layout, CPU, codec="uniform")
    compress_by(loco, other, torch.where(inside, gradient, -9.0), again)
    assert same(payload, again)


@pytest.mark.parametrize(
    ("row", "most"), [(96, 4.17), (128, 4.13), (160, 4.2), (192, 4.17), (2736, 4.13), (2880, 4.13)]
)
@pytest.mark.parametrize("shards", [1, 8, 64])
def test_bits_of_an_element(row, most, shards):
    numel = 4096 * row
    layout = BlockLayout.of(numel, shards, 4, 128, spans=[Span.of(0, (4096, row))])
    assert 8 * shards * layout.payload_bytes / numel <= most + 0.003


def test_a_shard_whose_places_pass_32_bits_is_refused():
    """An unbucketed model of many billions over few ranks."""
    numel = 2**31 + 4096
    spans = [Span.of(0, (numel // 4096, 4096))]
    with pytest.raises(UserError, match="ddp_bucket_size, or use more data-parallel ranks"):
        BlockTable.of(spans, [[(0, numel)]], 4096, 8)
    last = BlockTable.of(spans, [[(0, 2**31 - 1)]], 4096, 8).places[0, -1].tolist()
    assert last == [2**31 - 4096, 4095, 2**29 - 1024]
