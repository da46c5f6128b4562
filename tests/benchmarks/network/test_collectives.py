"""`python -m benchmarks.network --links`: collectives alone, over all ranks, in hosts and between them."""

from __future__ import annotations

from typing import Any

from worker_pool import WorkerPool

from benchmarks.network import collectives


def curves(local: int) -> list[dict[str, Any]]:
    """In a worker: the curves up to 16 KiB."""
    return collectives.measure(local, 1 << 14)


def test_groups_of_two_hosts_share_the_uplink(pool: WorkerPool) -> None:
    """Four ranks as two hosts of two: all, inside and between; and as four hosts of one."""
    measured, *others = pool.run(curves, 2, world_size=4)
    assert all(other == measured for other in others)
    assert {(one["scope"], one["ranks"]) for one in measured} == {("all", 4), ("inside", 2), ("between", 2)}
    assert {one["collective"] for one in measured} == {"all_to_all", "reduce_scatter", "all_gather"}
    assert all(one["seconds"] > 0 for one in measured)
    sent = [one["bytes"] for one in measured if (one["scope"], one["collective"]) == ("all", "all_to_all")]
    assert sent == [3072, 12288]
    assert {one["scope"] for one in pool.run(curves, 1, world_size=4)[0]} == {"all"}
