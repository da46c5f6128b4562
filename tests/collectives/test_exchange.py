"""The bytes that every exchange says it sends are those that it sends. Its numbers: test_numbers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.setups import setup_of

from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
from megatron_patch.quantization.blocks import Contents

RANKS, PER_NODE, NUMEL = 4, 2, 1200
EXCHANGES = {
    "reduce_scatter": 900,
    "two_hop_reduce_scatter": 300,
    "all_reduce": 1800,
    "two_hop_all_reduce": 600,
}
"""Elements that a rank sends to other ranks, or in two hops to other nodes."""


def exchanged(name: str, options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """In a worker: one exchange, with the bytes that torch's collectives are given counted by their group."""
    ranks_per_node = PER_NODE if name.startswith("two_hop") else None
    setup = setup_of(topology="auto", ranks_per_node=ranks_per_node, **options)
    make = make_all_reduces if name.endswith("all_reduce") else make_reduce_scatters
    (exchange,) = make([Contents(NUMEL)], dist.group.WORLD, setup).exchanges
    sent = {"inside": 0.0, "between": 0.0}

    def counting(call: Any, share: Any) -> Any:
        def counted(output: Any, input: Any, *args: Any, group: Any, **kwargs: Any) -> Any:
            same_node = len({one // PER_NODE for one in dist.get_process_group_ranks(group)}) == 1
            sent["inside" if same_node else "between"] += input.nbytes * share(group.size())
            return call(output, input, *args, group=group, **kwargs)

        return counted

    calls = {
        "all_to_all_single": lambda n: (n - 1) / n,
        "reduce_scatter_tensor": lambda n: (n - 1) / n,
        "all_gather_into_tensor": lambda n: n - 1,
    }
    before = {call: getattr(dist, call) for call in calls}
    tensor = torch.randn(NUMEL).to(getattr(torch, dtype))
    output = tensor if name.endswith("all_reduce") else tensor.view(RANKS, -1)[dist.get_rank()]
    said = exchange.traffic(tensor)
    try:
        for call, share in calls.items():
            setattr(dist, call, counting(before[call], share))
        exchange.start(tensor, output, average=True).wait()
    finally:
        for call, original in before.items():
            setattr(dist, call, original)
    told = {"inside": said.inside, "between": said.between.nbytes}
    return {"sent": sent, "said": told, "elements": said.between.elements}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_the_traffic_is_what_is_sent(pool, name, dtype):
    options = {"method": "naive", "bits": 8, "block_size": 64}
    for report in pool.run(exchanged, name, options, dtype, world_size=RANKS):
        assert report["said"] == report["sent"]
        assert report["elements"] == EXCHANGES[name]
        assert (report["said"]["inside"] > 0) == ("two_hop" in name)
