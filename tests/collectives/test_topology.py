"""Which groups of ranks two hops serve, and the groups that they make."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.setups import setup_of

from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
from megatron_patch.collectives.topology import (
    NoTwoHops,
    inside_shares,
    ranks_per_node,
    split_by_node,
    two_hops,
)
from megatron_patch.quantization.blocks import Contents

REGULAR = [
    (range(4), 2, (2, 2)),
    (range(16), 8, (2, 8)),
    ((0, 2, 4, 6), 4, (2, 2)),  # tensor-parallel ranks are neighbours
    ((1, 3, 5, 7, 9, 11), 4, (3, 2)),
    ((4, 5, 6, 7), 2, (2, 2)),  # another pipeline stage
    ((0, 1, 6, 7), 2, (2, 2)),
]
NONE = [
    (range(8), None, "LOCAL_WORLD_SIZE", True),
    (range(4), 4, "all of its ranks are on one node", False),
    ((0, 4, 8), 4, "each of its ranks is on a node of its own", False),
    (range(8), 3, "irregularly on nodes of 3: 3 on node 0, 3 on node 1, 2 on node 2", True),
    (range(3), 2, "irregularly", True),
    ((0, 2, 1, 3), 2, "irregularly", True),
    ((0, 1, 2, 4), 4, "3 on node 0, 1 on node 1", True),
]


@pytest.mark.parametrize(("ranks", "per_node", "expected"), REGULAR)
def test_a_regular_group_is_split_into_nodes(ranks: Any, per_node: int, expected: tuple[int, int]) -> None:
    assert split_by_node(list(ranks), per_node) == expected


@pytest.mark.parametrize(("ranks", "per_node", "why", "irregular"), NONE)
def test_others_say_why_not(ranks: Any, per_node: int | None, why: str, irregular: bool) -> None:
    with pytest.raises(NoTwoHops, match=why) as caught:
        split_by_node(list(ranks), per_node)
    assert caught.value.irregular == irregular


SLURM = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, 8),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "16"}, 16),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x1),4(x2)"}, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "9,7"}, None),
        (SLURM | {"SLURM_DISTRIBUTION": "block"}, 8),
        (SLURM | {"SLURM_DISTRIBUTION": "cyclic:block"}, None),
        ({"SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "4(x4)"}, 4),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),
        (SLURM | {"LOCAL_WORLD_SIZE": "2"}, 2),
        (OPEN_MPI, 4),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_without_torchrun_srun_or_mpirun_says_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "LOCAL_WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "16")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_per_node(None) == expected
    if expected and "LOCAL_WORLD_SIZE" not in variables:
        monkeypatch.delenv("WORLD_SIZE")  # scripts may set up torch.distributed without it
        assert ranks_per_node(None) == expected


def shares_with(per_node: str | None) -> Any:
    if per_node is None:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    else:
        os.environ["LOCAL_WORLD_SIZE"] = per_node
    return inside_shares(dist.new_group(use_local_synchronization=True))


@pytest.mark.parametrize(
    ("per_node", "shares"), [("2", (1 / 2, 1 / 3)), ("4", (1, 1)), ("1", (0, 0)), (None, (0, 0))]
)
def test_of_a_ring_one_rank_of_each_node_sends_to_another_node(pool, per_node, shares):
    """In an all-to-all of four ranks on two nodes, each sends to one neighbour and to two others."""
    for found in pool.run(shares_with, per_node, world_size=4):
        assert found == pytest.approx(shares)


def with_unlike_environments(per_node: list[str | None]) -> list[str]:
    """Exchanges of ranks that read another LOCAL_WORLD_SIZE each: what they are, and why."""
    rank = dist.get_rank()
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if per_node[rank] is not None:
        os.environ["LOCAL_WORLD_SIZE"] = per_node[rank]
    found = []
    for make in (make_reduce_scatters, make_all_reduces):
        made = make([Contents(1024)], dist.group.WORLD, setup_of(method="naive", bits=8))
        (exchange,) = made.exchanges
        values = torch.full((1024,), float(rank))
        whole = make is make_all_reduces
        output = values if whole else values.view(4, -1)[rank]
        exchange.start(values, output, average=False).wait()
        assert torch.allclose(output, torch.full_like(output, 6.0), rtol=0.1)
        found.append(f"{exchange.describe()}: {made.flat_because}")
    return found


@pytest.mark.parametrize("per_node", [["2", "2", "1", "1"], ["2", "2", "2", None]])
def test_ranks_that_read_unlike_environments_all_go_flat_and_say_why(
    pool: Any, per_node: list[str | None]
) -> None:
    unlike = "(1, 2)" if per_node[-1] else "(unknown, 2)"
    reports = pool.run(with_unlike_environments, per_node, world_size=4, timeout=60)
    for scatter, reduce in reports:
        assert scatter.startswith("reduce-scatter over 4 ranks: its ranks have unlike numbers of ranks")
        assert reduce.startswith("all-reduce over 4 ranks: its ranks have unlike numbers of ranks")
        assert unlike in scatter
        assert "same ranks_per_node" in scatter


def made_while_bound() -> list[object]:
    """The device that the default group has while groups are made, and afterwards."""
    original, seen = dist.new_group, []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        seen.append(dist.group.WORLD.bound_device_id)
        return original(*args, **kwargs)

    dist.group.WORLD.bound_device_id = torch.device("cpu", 0)  # as init_process_group(device_id=...) does
    dist.new_group = new_group
    try:
        two_hops(dist.group.WORLD, 2)
        return [*map(str, seen), str(dist.group.WORLD.bound_device_id)]
    finally:
        dist.new_group = original
        dist.group.WORLD.bound_device_id = None


def test_groups_are_not_split_off_the_whole_job(pool: Any) -> None:
    assert pool.run(made_while_bound, world_size=4) == [["None", "None", "cpu:0"]] * 4


def groups_of_my_own() -> dict[str, list[int]]:
    """Even and odd ranks are data-parallel groups; odd ones make theirs later, and rank 7's group none."""
    rank = dist.get_rank()
    even, odd = dist.new_group([0, 2, 4, 6]), dist.new_group([1, 3, 5])
    if rank == 7:
        return {}
    if rank % 2:
        dist.barrier(odd)
        try:
            two_hops(odd, 4)
        except NoTwoHops:
            return {}
    hops = two_hops(even, 4)
    again = two_hops(even, 4)
    assert (hops.intra, hops.inter) == (again.intra, again.inter)
    assert (hops.nodes, hops.local) == (2, 2)
    return {
        "intra": dist.get_process_group_ranks(hops.intra),
        "inter": dist.get_process_group_ranks(hops.inter),
    }


def test_a_group_makes_its_hops_without_waiting_for_others(pool: Any) -> None:
    found = pool.run(groups_of_my_own, world_size=8, timeout=60)
    assert [ranks.get("intra") for ranks in found[::2]] == [[0, 2], [0, 2], [4, 6], [4, 6]]
    assert [ranks.get("inter") for ranks in found[::2]] == [[0, 4], [2, 6], [0, 4], [2, 6]]
    assert found[1::2] == [{}] * 4
