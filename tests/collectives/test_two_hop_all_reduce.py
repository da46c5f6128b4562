"""The two-hop all-reduce on 4 ranks, 2 nodes of 2: sums, means, what is not finite, odd lengths, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeds import seeded

RANKS = 4


def exchange(
    options: dict[str, Any], numel: int, dtype: str, average: bool, bad: float | None
) -> dict[str, Any]:
    """In a worker: two all-reduces of random numbers; what it holds, what is exact, bytes."""
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.topology import two_hops
    from megatron_patch.collectives.two_hop import TwoHopAllReduce
    from megatron_patch.quantization.blocks import Contents

    two_hop = TwoHopAllReduce(Contents(numel), two_hops(dist.group.WORLD, 2), setup_of(**options))
    for _ in range(2):
        every = [
            torch.randn(numel, generator=torch.Generator().manual_seed(seeded(rank))) for rank in range(RANKS)
        ]
        every = [one.to(getattr(torch, dtype)) for one in every]
        if bad is not None:
            every[3][5] = bad
        data = every[dist.get_rank()].clone()
        two_hop.start(data, data, average).wait()
    exact = sum(one.double() for one in every) / (RANKS if average else 1)
    held = [torch.empty_like(data) for _ in range(RANKS)]
    dist.all_gather(held, data)
    return {
        "held": data.double(),
        "exact": exact,
        "same": all(torch.equal(held[0].nan_to_num(7), other.nan_to_num(7)) for other in held),
        "elements": two_hop.sender.layout.numel,
        "inside": two_hop.traffic(data).inside,
    }


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numel", [1000, 1003, 3])
def test_every_rank_holds_the_sum_or_the_true_mean(pool: Any, average: bool, dtype: str, numel: int) -> None:
    options = {"method": "naive", "bits": 8, "block_size": 64}
    reports = pool.run(exchange, options, numel, dtype, average, None, world_size=RANKS)
    for report in reports:
        assert report["same"]
        exact = report["exact"]
        off = (report["held"] - exact).abs().max() / exact.abs().max()
        assert off <= (0.05 if dtype == "bfloat16" else 0.04)
    assert sum(report["elements"] for report in reports[:2]) == numel  # of a node's ranks


def test_what_is_not_finite_reaches_every_rank(pool: Any) -> None:
    options = {"bits": 4}
    for report in pool.run(exchange, options, 1000, "float32", False, float("inf"), world_size=RANKS):
        assert report["same"]
        assert not report["held"][5].isfinite()


def test_traffic_inside_the_node(pool: Any) -> None:
    options = {"bits": 2, "block_size": 64}
    report = pool.run(exchange, options, 1000, "float32", True, None, world_size=RANKS)[0]
    assert report["inside"] == 500 * 4 + 2 * payload_bytes(250)  # hop 1, and two nodes' payloads in hop 3


def payload_bytes(elements: int) -> int:
    """Bytes of a 2-bit payload with blocks of 64, as quantization/layout.py says."""
    codes = -(-(elements // 4 + bool(elements % 4)) // 16) * 16
    return -(-(codes + 2 * -(-elements // 64)) // 16) * 16
