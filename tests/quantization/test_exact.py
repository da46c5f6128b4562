"""Vectors that are sent as they are: which elements, in which shard, and their sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded_values import rows_of
from quantization.backend_agreement import only_torch

from megatron_patch.collectives.sender import Sender, decompress, decompress_reduce
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout

CPU = torch.device("cpu")
SPANS = [
    Span.of(0, (4, 128)),
    Span.of(512, (100,), exact=True),
    Span.of(640, (3, 96)),
    Span.of(1000, (1,), exact=True),
    Span.of(1001, (13,), exact=True),
    Span.of(1024, (2, 256)),
]
NUMEL = 1550
VECTORS = [*range(512, 612), *range(1000, 1014)]


def gradients(senders: int) -> torch.Tensor:
    return torch.randn(senders, NUMEL, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3, 7])
@pytest.mark.parametrize("divisor", [1, 3])
def test_the_owners_get_the_sums_of_vectors_to_the_last_bit(shards, divisor, dtype):
    config = CompressionConfig(method="loco", bits=2)
    layout = BlockLayout.of(NUMEL, shards, 2, 128, spans=SPANS)
    values = gradients(3).to(dtype)
    sent = torch.full((3, sum(layout.payload_sizes)), 0xA5, dtype=torch.uint8)
    for row, payload in zip(values, sent, strict=True):
        Sender(config, layout, CPU).compress(row, payload)
    payloads = torch.stack([rows_of(layout, payload) for payload in sent])
    codec = Sender(config, layout, CPU).codec
    total = torch.full((NUMEL,), 7.0)
    for shard, output in enumerate(total.split(layout.shard_size)):
        own = layout.part(shard)
        decompress_reduce(payloads[:, shard, : own.payload_bytes].contiguous(), codec, own, output, divisor)
    wanted = (values.double().sum(0) / divisor).float()
    assert torch.equal(total[VECTORS], wanted[VECTORS])
    coded = [
        place for span in SPANS if not span.exact for place in range(span.start, span.start + span.length)
    ]
    assert not torch.equal(total[coded], wanted[coded])
    lost = (total[coded] - wanted[coded]).square().sum() / wanted[coded].square().sum()
    assert lost < 0.14
    padding = np.setdiff1d(np.arange(NUMEL), [*VECTORS, *coded])
    assert not total[padding].any()
    assert layout.payload_sizes == [layout.part(shard).payload_bytes for shard in range(shards)]
    for shard, nbytes in enumerate(layout.exact.nbytes):
        assert not payloads[:, shard, layout.coded_bytes + nbytes :].any()


@pytest.mark.parametrize("shards", [1, 4])
def test_all_shards_at_once(shards):
    """What an all-gather brings: one payload for every shard."""
    config = CompressionConfig(method="naive", bits=8)
    layout = BlockLayout.of(NUMEL, shards, 8, 128, spans=SPANS)
    values = gradients(1)[0]
    sent = torch.empty(sum(layout.payload_sizes), dtype=torch.uint8)
    sender = Sender(config, layout, CPU)
    sender.compress(values, sent)
    payload = rows_of(layout, sent)
    output = torch.empty(NUMEL)
    decompress(payload, sender.codec, layout, output)
    assert torch.equal(output[VECTORS], values[VECTORS])
    with only_torch():
        other = torch.empty(NUMEL)
        decompress(payload, sender.codec, layout, other)
    assert torch.equal(output, other)
