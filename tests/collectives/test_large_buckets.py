"""What the exchanges of a bucket of billions of elements cost the host before any gradient comes."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from collectives.setups import setup_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_patch.collectives.all_reduce import AllReduce
from megatron_patch.collectives.reduce_scatter import ReduceScatter
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.collectives.two_hop import TwoHopAllReduce, TwoHopReduceScatter
from megatron_patch.errors import UserError
from megatron_patch.quantization import blocks
from megatron_patch.quantization.blocks import Contents, Span

MOST_BYTES = 200e6


@dataclass
class Group:
    """A stand-in for a process group, of which exchanges ask this when they are built."""

    ranks: int
    number: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


class HostTensors(TorchDispatchMode):
    """Adds up the bytes of all tensors that are computed on the CPU."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.nbytes += tensor.nbytes
        return result


def llama_70b(elements: float, split: int) -> tuple[Span, ...]:
    """The parameters of llama2_70b's layers over `split` tensor-parallel ranks, as many as fit, with its
    norms and the output layer; each begins at a multiple of 64, as Megatron places them."""
    layer = [(8192,), (10240 // split, 8192), (8192, 8192 // split), (8192,)]
    layer += [(57344 // split, 8192), (8192, 28672 // split)]
    spans, start = [], 0
    for shape in [(32000 // split, 8192), *(layer * 80)]:
        span = Span.of(start, shape, exact=len(shape) == 1)
        if start + span.length > elements:
            break
        spans.append(span)
        start = -(-(start + span.length) // 64) * 64
    return tuple(spans)


def contents(elements: float, split: int, ranks: int) -> Contents:
    spans = llama_70b(elements, split)
    multiple = 128 * ranks
    return Contents(-(-(spans[-1].start + spans[-1].length) // multiple) * multiple, spans)


@pytest.mark.parametrize("split", [1, 8])
@pytest.mark.parametrize("shards", [8, 12, 64])
@pytest.mark.parametrize("even", [False, True])
def test_a_bucket_of_billions_is_attached_at_once(split, shards, even):
    bucket = contents(4.6e9, split, shards)
    assert bucket.numel > 4.3e9
    if even:
        length = bucket.numel // shards
        bucket = Contents(bucket.numel, (Span.of(0, (shards, length)),))
    hops = TwoHops(shards // 4, 4, Group(4, 1), Group(shards // 4, 1))
    with HostTensors():
        ReduceScatter(contents(1e9, 8, 8), Group(8), setup_of(device="meta"))  # for which torch imports much
    tracemalloc.start()
    with HostTensors() as host:
        made = [
            ReduceScatter(bucket, Group(shards, shards - 1), setup_of(device="meta")),
            AllReduce(bucket, Group(shards, shards - 1), setup_of(device="meta")),
            TwoHopReduceScatter(bucket, hops, setup_of(device="meta")),
            TwoHopAllReduce(bucket, hops, setup_of(device="meta")),
        ]
        sent = [exchange.traffic(torch.empty(bucket.numel, device="meta")) for exchange in made]
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4.1 < 8 * sent[0].between.nbytes / sent[0].between.elements < 4.2
    assert host.nbytes + python < MOST_BYTES, "of four exchanges together"


def test_a_shard_that_is_too_long_is_refused_before_anything_is_counted(monkeypatch):
    monkeypatch.setattr(blocks, "within", lambda *_: pytest.fail("the blocks were looked at"))
    with pytest.raises(UserError, match="ddp_bucket_size, or use more data-parallel ranks"):
        ReduceScatter(Contents(2**40, (Span(0, 2**40, 4096),)), Group(8), setup_of(device="meta"))
