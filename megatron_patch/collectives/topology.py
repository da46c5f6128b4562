"""Which ranks of a group share a node, and the process groups within a node and between nodes.

A flat all-to-all sends every rank's own payload out of its node. With R of the group's ranks on a node, it is
R times less if the node's ranks are summed first.

    node i, local rank j  =  rank n = i*R + j of the group
    intra group of node i:          its R ranks
    inter group of local rank j:    the j-th rank of every node

Only this regular placement is supported: the same R on every node, and one node's ranks after the other's.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


@dataclass(frozen=True)
class TwoHops:
    """A group of `nodes` x `local` ranks, with this rank's groups within its node and between nodes."""

    nodes: int
    local: int
    intra: dist.ProcessGroup
    inter: dist.ProcessGroup

    def describe(self) -> str:
        return f"{self.nodes} nodes of {self.local} ranks"


class NoTwoHops(Exception):
    """Two hops are not possible for a group, or no better than one; the text says why.

    `irregular` is true if another placement of the ranks, or knowing the placement, would allow two hops.
    """

    def __init__(self, why: str, irregular: bool = False) -> None:
        super().__init__(why)
        self.irregular = irregular


def ranks_per_node(configured: int | None) -> int | None:
    """Return the ranks on a node: as configured, else from torchrun, srun or Open MPI; None if unknown.

    Each rank reads its own environment, so that ranks may get different answers (`agreed_ranks_per_node`).
    srun and mpirun may have started one process per node, which starts the ranks itself: their variables are
    used only if they started as many processes as the job has ranks (WORLD_SIZE, if it is set).
    """
    if configured is not None:
        return configured
    per_node = _number("LOCAL_WORLD_SIZE")
    if per_node is None and _started_all("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        in_order = not os.environ.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "arbitrary"))
        nodes = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
        same = re.fullmatch(r"(\d+)(\(x\d+\))?", nodes)  # "8(x2)" is regular; "8,4" is not.
        per_node = int(same[1]) if same and in_order else None
    if per_node is None and _started_all("OMPI_COMM_WORLD_SIZE"):
        per_node = _number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return per_node


def agreed_ranks_per_node(
    group: dist.ProcessGroup, configured: int | None, device: torch.device
) -> int | None:
    """Return `ranks_per_node` after checking that all ranks of `group`, which must all call it, agree.

    Args:
        device: the device of tensors for collectives of the group.

    Raises:
        NoTwoHops: on every rank, if the ranks' answers differ.
    """
    mine = ranks_per_node(configured)
    if dist.get_backend(group) == "fake":
        return mine  # The other ranks do not exist.
    answers = torch.empty(group.size(), dtype=torch.int64, device=device)
    own = torch.full((1,), mine or 0, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(answers, own, group=group)
    answered = sorted(set(answers.tolist()))
    if len(answered) > 1:
        counts = ", ".join(str(number) if number else "unknown" for number in answered)
        raise NoTwoHops(
            f"its ranks have unlike numbers of ranks on their nodes ({counts}), by ranks_per_node or by "
            "LOCAL_WORLD_SIZE or Slurm's or Open MPI's variables; give all ranks the same ranks_per_node if "
            "they lie regularly",
            irregular=True,
        )
    return mine


_inside_shares: WeakKeyDictionary[Any, tuple[float, float]] = WeakKeyDictionary()


def inside_shares(group: dist.ProcessGroup) -> tuple[float, float]:
    """Return which shares of what ranks send over `group` stay inside nodes, as means over its ranks.

    The first is that of a ring, by which NCCL sums and gathers; the second that of an all-to-all. Both are 0
    where the launcher does not say how many ranks a node has.
    """
    if group not in _inside_shares:
        shares, per_node = (0.0, 0.0), ranks_per_node(None)
        if per_node is not None and group.size() > 1 and dist.get_backend(group) != "fake":
            nodes = [rank // per_node for rank in dist.get_process_group_ranks(group)]
            ring = sum(node == after for node, after in zip(nodes, nodes[1:] + nodes[:1], strict=True))
            pairs = sum(ranks * (ranks - 1) for ranks in Counter(nodes).values())
            shares = ring / len(nodes), pairs / len(nodes) / (len(nodes) - 1)
        _inside_shares[group] = shares
    return _inside_shares[group]


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None


def _started_all(*counts: str) -> bool:
    """Whether the first of these variables that is set equals WORLD_SIZE, or WORLD_SIZE is not set."""
    started = next((number for number in map(_number, counts) if number is not None), None)
    return started is not None and started == (_number("WORLD_SIZE") or started)


def split_by_node(ranks: Sequence[int], per_node: int | None) -> tuple[int, int]:
    """Return (nodes, ranks of the group on each node) for a group's global ranks, in the group's order.

    Raises:
        NoTwoHops: there is a single node or one rank per node, or the placement is irregular or unknown.
    """
    if per_node is None:
        raise NoTwoHops(
            "neither LOCAL_WORLD_SIZE nor Slurm's or Open MPI's variables say how many ranks a node has; set "
            "ranks_per_node",
            irregular=True,
        )
    nodes = [rank // per_node for rank in ranks]
    distinct = list(dict.fromkeys(nodes))
    local = len(ranks) // len(distinct)
    if len(distinct) == 1:
        raise NoTwoHops("all of its ranks are on one node")
    if len(distinct) == len(ranks):
        raise NoTwoHops("each of its ranks is on a node of its own")
    if nodes != [node for node in distinct for _ in range(local)]:
        counted = ", ".join(f"{nodes.count(node)} on node {node}" for node in distinct)
        raise NoTwoHops(f"its ranks lie irregularly on nodes of {per_node}: {counted}", irregular=True)
    return len(distinct), local


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups by their ranks, each with the default group for which it was made: a later job makes its own."""


def two_hops(group: dist.ProcessGroup, per_node: int | None) -> TwoHops:
    """Make the process groups of two hops over `group`. Every rank of `group` must call it.

    Raises:
        NoTwoHops: on every rank, for the reasons of split_by_node.
    """
    ranks = dist.get_process_group_ranks(group)
    nodes, local = split_by_node(ranks, per_node)
    node, place = divmod(group.rank(), local)
    timeout = time_limit(group)
    intra = _group(ranks[node * local : (node + 1) * local], timeout)
    inter = _group(ranks[place::local], timeout)
    return TwoHops(nodes, local, intra, inter)


def time_limit(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return the time limit of `group`'s collectives (Megatron's --distributed-timeout-minutes).

    It is torch's default for a backend without one, such as that of Megatron's --fake-process-group.
    """
    backend: Any = group._get_backend(group._device_types[0])
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, datetime.timedelta) else default_pg_timeout


def _group(ranks: list[int], timeout: datetime.timedelta) -> Any:
    key = tuple(ranks)
    world, group = _groups.get(key, (None, None))
    if group is None or world is not dist.group.WORLD:
        # Only the members may be waited for: other ranks need not call this function.
        with _unbound():
            group = dist.new_group(
                ranks, timeout=timeout, use_local_synchronization=True, group_desc="megatron-loco"
            )
        _groups[key] = (dist.group.WORLD, group)
    return group


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Unset the default group's `bound_device_id` within the block.

    With a bound device torch makes groups by ncclCommSplit, which all ranks of the job must call
    (pytorch#129965). Without one the members make a group's communicator at its first collective.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
