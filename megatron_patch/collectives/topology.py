"""Which ranks of a group share a node, and the process groups within a node and between nodes.

A ring reduce-scatter carries every node's sum once over its link; a flat all-to-all carries every rank's own
copy. With R of the group's ranks on a node, summing inside the node first cuts what leaves it R times.

    node i, local rank j  =  rank n = i*R + j of the group
    intra group of node i:          its R ranks
    inter group of local rank j:    the j-th rank of every node

Only that regular placement is served: the same R on every node, nodes one after the other.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout


@dataclass(frozen=True)
class TwoHops:
    """A group of `nodes` x `local` ranks, and this rank's groups within its node and between nodes."""

    nodes: int
    local: int
    intra: dist.ProcessGroup
    inter: dist.ProcessGroup

    def describe(self) -> str:
        """For the log."""
        return f"{self.nodes} nodes of {self.local} ranks"


class NoTwoHops(Exception):
    """A group for which two hops are not possible, or no better than one; the text says why.

    `irregular` is true if another placement of its ranks, or knowledge of it, would make two hops possible.
    """

    def __init__(self, why: str, irregular: bool = False) -> None:
        super().__init__(why)
        self.irregular = irregular


def ranks_per_node(configured: int | None) -> int | None:
    """Ranks on a node: as configured, else as torchrun, Slurm's srun or Open MPI says; None: unknown.

    Ranks read their own environments, and may find unlike answers (`agreed_ranks_per_node`). srun and mpirun
    may have started one process a node, which then starts the ranks: they are asked only where they started
    as many as the job has ranks (WORLD_SIZE, if it is set).
    """
    if configured is not None:
        return configured
    found = _number("LOCAL_WORLD_SIZE")
    if found is None and _started_all("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        in_order = not os.environ.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "arbitrary"))
        nodes = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
        same = re.fullmatch(r"(\d+)(\(x\d+\))?", nodes)  # "8(x2)"; "8,4" are unlike nodes
        found = int(same[1]) if same and in_order else None
    if found is None and _started_all("OMPI_COMM_WORLD_SIZE"):
        found = _number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return found


def agreed_ranks_per_node(
    group: dist.ProcessGroup, configured: int | None, device: torch.device
) -> int | None:
    """`ranks_per_node`, the same on all ranks of `group`. Every one of them must call it.

    Args:
        device: of tensors that the group's collectives take.

    Raises:
        NoTwoHops: on every rank, where their environments do not say the same.
    """
    mine = ranks_per_node(configured)
    if dist.get_backend(group) == "fake":
        return mine  # it stands for ranks that do not exist
    answers = torch.empty(group.size(), dtype=torch.int64, device=device)
    own = torch.full((1,), mine or 0, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(answers, own, group=group)
    found = sorted(set(answers.tolist()))
    if len(found) > 1:
        counts = ", ".join(str(number) if number else "unknown" for number in found)
        raise NoTwoHops(
            f"its ranks have unlike numbers of ranks on their nodes ({counts}), by ranks_per_node or by "
            "LOCAL_WORLD_SIZE or Slurm's or Open MPI's variables; give all ranks the same ranks_per_node if "
            "they lie regularly",
            irregular=True,
        )
    return mine


def _number(variable: str) -> int | None:
    found = os.environ.get(variable, "")
    return int(found) if found.isdigit() else None


def _started_all(*counts: str) -> bool:
    """Whether the first of these variables that is set is the number of the job's ranks."""
    started = next((number for number in map(_number, counts) if number is not None), None)
    return started is not None and started == (_number("WORLD_SIZE") or started)


def split_by_node(ranks: Sequence[int], per_node: int | None) -> tuple[int, int]:
    """(nodes, ranks of the group on each) of a group's global ranks in their order.

    Raises:
        NoTwoHops: a single node, one rank a node, or a placement that is not regular.
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


_made: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups by their ranks, each with the job's default group at that time: a later job makes its own."""


def two_hops(group: dist.ProcessGroup, per_node: int | None) -> TwoHops:
    """The hops of `group`; makes the groups that it needs. Every rank of `group` must call it.

    Raises:
        NoTwoHops: on every rank, as split_by_node.
    """
    ranks = dist.get_process_group_ranks(group)
    nodes, local = split_by_node(ranks, per_node)
    node, place = divmod(group.rank(), local)
    timeout = time_limit(group)
    intra = _group(ranks[node * local : (node + 1) * local], timeout)
    inter = _group(ranks[place::local], timeout)
    return TwoHops(nodes, local, intra, inter)


def time_limit(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long a collective of `group` may take (Megatron's --distributed-timeout-minutes).

    torch's default for a backend that does not say, such as that of Megatron's --fake-process-group.
    """
    backend: Any = group._get_backend(group._device_types[0])
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, datetime.timedelta) else default_pg_timeout


def _group(ranks: list[int], timeout: datetime.timedelta) -> Any:
    key = tuple(ranks)
    world, made = _made.get(key, (None, None))
    if made is None or world is not dist.group.WORLD:
        # Only members take part: ranks of other groups, which may have nothing to make, cannot be waited for.
        with _unbound():
            made = dist.new_group(
                ranks, timeout=timeout, use_local_synchronization=True, group_desc="megatron-loco"
            )
        _made[key] = (dist.group.WORLD, made)
    return made


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Within the block the default group has no device of its own.

    From one that has, torch makes groups by ncclCommSplit, for which all of the job's ranks must call
    (pytorch#129965). Without one a group's communicator is made at its first collective, by its members.
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
