"""The two-hop reduce-scatter: the true sum and mean, 8 bits inside the node, NaN; and the pool's buffers.

That its parameters, errors and steps are the simulated ones is in tests/with_megatron/test_parallelism.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seeds import seeded

SHARD = 300
RANKS, PER_NODE = 4, 2


def exchange(options: dict[str, Any], dtype: str, average: bool, bad: float | None) -> dict[str, Any]:
    """Five exchanges; the last shard, what it should be, and what the hops cost. `bad` stands in rank 1's."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.topology import two_hops
    from megatron_patch.collectives.two_hop import TwoHopReduceScatter
    from megatron_patch.quantization.blocks import Contents

    rank, setup = dist.get_rank(), setup_of(**options)
    two_hop = TwoHopReduceScatter(Contents(RANKS * SHARD), two_hops(dist.group.WORLD, PER_NODE), setup)
    nbytes = []
    for step in range(5):
        gradients = [
            torch.from_numpy(np.random.default_rng((seeded(step), other)).standard_normal(RANKS * SHARD)).to(
                getattr(torch, dtype)
            )
            for other in range(RANKS)
        ]
        if bad is not None:
            gradients[1][2 * SHARD + 7] = bad
        bucket = gradients[rank].clone()
        output = bucket[rank * SHARD : (rank + 1) * SHARD]
        two_hop.start(bucket, output, average).wait()
        nbytes.append(setup.workspace.nbytes)
    exact = sum(gradient.double() for gradient in gradients)[rank * SHARD : (rank + 1) * SHARD]
    error = two_hop.sender.error
    return {
        "shard": output.double(),
        "exact": exact / (RANKS if average else 1),
        "nbytes": nbytes,
        "error bytes": 0 if error is None else error.nbytes,
        "inside": two_hop.traffic(bucket).inside,
        "between": two_hop.traffic(bucket).between.nbytes,
    }


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shard_is_the_sum_or_the_true_mean(pool: Any, average: bool, dtype: str) -> None:
    options = {"method": "naive", "bits": 8, "block_size": 64}
    for report in pool.run(exchange, options, dtype, average, None, world_size=RANKS):
        exact = report["exact"]
        # 1/254 of a block's maximum for each 8-bit hop's senders, and bf16's own rounding.
        bound = exact.abs().max() * (0.04 if dtype == "bfloat16" else 0.03)
        assert (report["shard"] - exact).abs().max() <= bound
        assert (report["shard"] - exact).abs().max() > 0
        assert report["nbytes"][0] == report["nbytes"][-1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_owner_alone(pool: Any, bad: float) -> None:
    options = {"bits": 4}
    reports = pool.run(exchange, options, "float32", False, bad, world_size=RANKS)
    finite = [bool(report["shard"].isfinite().all()) for report in reports]
    assert not finite[2]
    assert finite == [True, True, False, True]


def test_error_and_traffic_inside_the_node(pool: Any) -> None:
    for report in pool.run(exchange, {"bits": 4}, "float32", True, None, world_size=RANKS):
        assert report["error bytes"] == RANKS * SHARD // 2 + 2 * 2 * 3  # codes; scales of 2 x 3 blocks
        assert report["inside"] == 4 * RANKS * SHARD / 2
        assert report["between"] == SHARD // 2 + 10 + 2 * 3 + 10  # to one other node; alignment to 16


def test_the_pool_keeps_no_more_buffers_than_were_in_use_at_a_time() -> None:
    import torch

    from megatron_patch.collectives.workspace import Workspace

    workspace = Workspace(torch.device("cpu"))
    for rows, columns in ((2, 100), (4, 64), (1, 300), (3, 10), (2, 100)):
        first, second = workspace.take(rows, columns), workspace.take(rows, columns)
        assert first.shape == (rows, columns)
        assert first.data_ptr() != second.data_ptr()
        workspace.give(first)
        workspace.give(second)
    assert workspace.nbytes == 600
    big, small = workspace.take(1, 300), workspace.take(1, 8)
    workspace.give(small)
    again = workspace.take(1, 200)
    assert again.data_ptr() == small.data_ptr()
    assert workspace.nbytes == 600
    workspace.give(big)
