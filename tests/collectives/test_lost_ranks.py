"""After a failed collective: who answers the roll call, and what the error says."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron_patch.collectives.lost_ranks import ExchangeFailed, name_ranks, naming_lost_ranks, roll_call


def call(present: list[int], asked: list[int], seconds: float = 1.0) -> dict[int, set[int]]:
    """What each rank that is there hears, when they call one after the other."""
    store, heard = dist.HashStore(), {}

    def one(rank: int) -> None:
        time.sleep(0.05 * rank)
        heard[rank] = roll_call(store, rank, asked, seconds)

    threads = [threading.Thread(target=one, args=[rank]) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_every_rank_hears_of_every_other() -> None:
    start = time.monotonic()
    assert call([0, 1, 2, 5], [0, 1, 2, 5], 60) == {rank: {0, 1, 2, 5} for rank in (0, 1, 2, 5)}
    assert time.monotonic() - start < 30  # no rank waits for one that has answered


def test_who_is_silent_is_missing_on_every_rank() -> None:
    assert call([0, 2], [0, 1, 2, 3]) == {0: {0, 2}, 2: {0, 2}}


def test_a_store_out_of_reach_is_told_from_lost_ranks() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60))
    client = dist.TCPStore("127.0.0.1", server.port, timeout=datetime.timedelta(seconds=60))
    del server
    start = time.monotonic()
    assert roll_call(client, 0, [0, 1], 1.0) == set()
    assert time.monotonic() - start < 10


def test_ranks_are_named() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 5]) == "ranks 3, 5"
    assert name_ranks(list(range(11))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def lone_wait() -> str:
    """Rank 0 sends to rank 1, which never comes; rank 2 fails likewise. What ranks say."""
    from megatron_patch.collectives import lost_ranks
    from megatron_patch.collectives.topology import time_limit

    group = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=1))
    assert time_limit(group) == datetime.timedelta(seconds=1)
    lost_ranks.ROLL_CALL_SECONDS = 1.0
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    import torch

    with pytest.raises(ExchangeFailed) as failed, naming_lost_ranks("an exchange", None, group):
        dist.all_reduce(torch.ones(3), group=group)
    return str(failed.value)


def test_a_collective_that_fails_names_the_rank_that_did_not_come(pool: Any) -> None:
    said = pool.run(lone_wait, world_size=3)
    for rank in (0, 2):
        assert f"an exchange failed on rank {rank} on " in said[rank]
        assert "no answer from rank 1 within" in said[rank]
        assert "(2 of 3 ranks answered)" in said[rank]


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), naming_lost_ranks("an exchange"):
        raise RuntimeError("shapes do not match")
