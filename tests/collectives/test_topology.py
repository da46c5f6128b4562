"""Which groups of ranks two hops serve, and the groups that they make."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_patch.collectives.topology import NoTwoHops, ranks_per_node, split_by_node

REGULAR = [
    (range(4), 2, (2, 2)),
    (range(16), 8, (2, 8)),
    ((0, 2, 4, 6), 4, (2, 2)),  # tensor-parallel ranks are neighbours
    ((1, 3, 5, 7, 9, 11), 4, (3, 2)),
    ((4, 5, 6, 7), 2, (2, 2)),  # another pipeline stage
    ((0, 1, 6, 7), 2, (2, 2)),
]
NONE = [
    (range(8), None, "LOCAL_WORLD_SIZE", False),
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


def test_ranks_on_a_node_are_configured_or_torchrun_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_per_node(None) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_per_node(None) == 8
    assert ranks_per_node(4) == 4


def groups_of_my_own() -> dict[str, list[int]]:
    """Even and odd ranks are data-parallel groups; odd ones make theirs later, and rank 7's group none."""
    import torch.distributed as dist

    from megatron_patch.collectives.topology import two_hops

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
