"""Error states whose blocks follow parameters: what a manifest says of them, and those of 0.1.0, whose blocks
were counted from each shard's beginning."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_patch.collectives.sender import MovingAverageError
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.session.layouts import RankLayout, Storage, decode
from megatron_patch.session.resharding import (
    NODE_SUM,
    OWNER,
    REDUCE_SCATTER,
    Part,
    Piece,
    Position,
    reshard,
)

CPU = torch.device("cpu")
NUMEL, RANKS, LOCAL = 960, 4, 2
SHAPES = {"rows": (0, (6, 96)), "vector": (576, (137,)), "short": (768, (10, 12))}
SPANS = tuple(Span.of(start, shape, exact=len(shape) == 1) for start, shape in SHAPES.values())
CODED = tuple(
    start + k for start, shape in SHAPES.values() if len(shape) > 1 for k in range(math.prod(shape))
)
PIECES = tuple(
    Piece(name, name, (0,) * len(shape), shape, start, (*shape[1:], 1))
    for name, (start, shape) in SHAPES.items()
)
FLAT = BlockLayout.of(NUMEL, RANKS, 4, 64, spans=SPANS)
S = FLAT.shard_size
HELD = {
    "flat": (REDUCE_SCATTER, FLAT, Position(0, NUMEL)),
    "column": (NODE_SUM, FLAT.part(1, 2, step=LOCAL), Position(S, S, 2, LOCAL * S)),
    "owner": (OWNER, FLAT.part(2), Position(2 * S, S)),
}


def saved(layout: BlockLayout, dtype: str, values: torch.Tensor, rotated: bool = False) -> MovingAverageError:
    error = MovingAverageError(layout, 0.0, dtype, CPU, rotated)
    error.set(values)
    return error


def values_of(position: Position) -> torch.Tensor:
    """Numbers whose size differs from place to place, zero in padding; [position.numel]."""
    bucket = torch.zeros(NUMEL)
    drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 5, NUMEL)
    for piece in PIECES:
        piece.of(bucket).copy_(piece.of(drawn))
    return position.of(bucket).flatten().clone()


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("rotated", [False, True])
def test_a_manifest_tells_where_blocks_lie_and_whether_they_are_rotated(name, dtype, rotated):
    kind, layout, position = HELD[name]
    assert not layout.by_shard
    error = saved(layout, dtype, values_of(position), rotated)
    part = Part(kind, PIECES, NUMEL, position, 0, 2, 1.0, SPANS)
    storage = Storage(layout.shards, S, 64, dtype, layout.blocks, rotated)
    rank = RankLayout(((part, storage),))
    written = json.loads(json.dumps(rank.without_positions().as_json()))
    read = RankLayout.from_json(written).at(rank.positions)
    assert read == rank, "so that it is put back bit for bit"
    (found, how), *_ = read.states
    assert torch.equal(decode(error.tensors(), found, how), error.flat())


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
@pytest.mark.parametrize("name", HELD)
def test_errors_of_0_1_0_are_decoded_with_their_blocks_and_encoded_anew(name, dtype):
    kind, layout, position = HELD[name]
    old_layout = BlockLayout.by_shards(position.numel, layout.shards, S, 4, 64)
    values = values_of(position)
    old = saved(old_layout, dtype, values)
    part = Part(kind, PIECES, NUMEL, position, 0, 2, 1.0)
    written = RankLayout(((part, Storage(layout.shards, S, 64, dtype)),)).as_json()
    for bucket in written["buckets"]:
        del bucket["spans"]  # as 0.1.0 wrote it
    for state in written["states"]:
        del state["blocks"], state["rotated"]
    read = RankLayout.from_json(json.loads(json.dumps(written))).at([[*vars(position).values(), 0]])
    (found, how), *_ = read.states
    assert (found, how) == (part, Storage(layout.shards, S, 64, dtype))
    new_part = Part(kind, PIECES, NUMEL, position, 0, 2, 1.0, SPANS)
    assert found != new_part, "not put back as it is"
    ((carried, missing),) = reshard([new_part], [(found, lambda: decode(old.tensors(), found, how))])
    assert missing == 0
    assert torch.equal(carried, old.flat())
    everything = torch.arange(NUMEL)
    coded = torch.isin(position.of(everything).flatten(), torch.tensor(CODED))
    for rotated in (False, True):
        new = saved(layout, dtype, carried, rotated)
        off = (new.flat() - values)[coded].abs().max()
        if dtype == "fp32":
            assert off < (1e-5 if rotated else 1e-30)
        else:
            assert 0 < off < (4 if rotated else 2) * values.abs().max() / 127
        assert not new.flat()[~coded].any(), "of vectors no error is kept"
