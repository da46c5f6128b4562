"""Times gloo's collectives alone, for `python -m benchmarks.network --links`.

All-to-all, reduce-scatter and all-gather of growing sizes: over all ranks, over the ranks of each host, and
over the ranks of the same place on all hosts (all such groups at once, as in two hops).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

_LEAST = 1 << 12
_RUNS = 5
_SECONDS = 1.0
"""The runs at one size end after this time."""


def measure(local: int, most: int) -> list[dict[str, Any]]:
    """Measure the curves, and return the same list on every rank; every rank must call this.

    Args:
        local: the ranks of each host, which are numbered consecutively.
        most: the largest number of bytes that a rank sends.
    """
    import torch.distributed as dist

    curves = []
    for scope, group, ranks in _groups(local):
        for name, prepare in _collectives(group, ranks):
            nbytes = _LEAST
            while nbytes == _LEAST or nbytes <= most:
                seconds = _seconds(prepare(nbytes))
                sent = _rounded(nbytes, ranks) * (ranks - 1) // ranks
                curves.append(
                    {"collective": name, "scope": scope, "ranks": ranks, "bytes": sent, "seconds": seconds}
                )
                nbytes *= 4
    dist.barrier()
    return curves


def _groups(local: int) -> Iterator[tuple[str, Any, int]]:
    """Yield (scope, this rank's group, its size); all ranks create all groups."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    hosts = world // local
    yield "all", dist.group.WORLD, world
    if hosts == 1 or local == 1:
        return
    inside = [dist.new_group([host * local + place for place in range(local)]) for host in range(hosts)]
    yield "inside", inside[rank // local], local
    across = [dist.new_group([host * local + place for host in range(hosts)]) for place in range(local)]
    yield "between", across[rank % local], hosts


def _rounded(nbytes: int, ranks: int) -> int:
    return max(1, nbytes // ranks) * ranks


def _collectives(group: Any, ranks: int) -> Iterator[tuple[str, Callable[[int], Callable[[], Any]]]]:
    """Yield each collective's name, with a function that prepares a call for a number of bytes."""
    import torch
    import torch.distributed as dist

    def zeros(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(_rounded(nbytes // dtype.itemsize, ranks), dtype=dtype)

    def all_to_all(nbytes: int) -> Callable[[], Any]:
        whole, other = zeros(nbytes), zeros(nbytes)
        return lambda: dist.all_to_all_single(other, whole, group=group)

    def reduce_scatter(nbytes: int) -> Callable[[], Any]:
        whole = zeros(nbytes, torch.float32)
        shard = whole.new_zeros(whole.numel() // ranks)
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group)

    def all_gather(nbytes: int) -> Callable[[], Any]:
        whole = zeros(nbytes)
        shard = whole.new_zeros(whole.numel() // ranks)
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group)

    yield "all_to_all", all_to_all
    yield "reduce_scatter", reduce_scatter
    yield "all_gather", all_gather


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median over runs of the slowest rank's seconds, the same number on every rank."""
    import torch
    import torch.distributed as dist

    seconds: list[float] = []
    for number in range(_RUNS + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number:  # The first run connects the peers and is not counted.
            seconds.append(float(slowest))
        if sum(seconds) > _SECONDS:
            break
    return statistics.median(seconds)
