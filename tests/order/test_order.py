"""On a GPU the exchanges' work is in order: no race, no early free, and all ranks call alike.

No GPU runs here. The package's own code, under Megatron's, launches and waits as on one, and accounts are
kept of it (machine.py); 8 ranks are made one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from order.mutants import MUTANTS, found_in
from order.setups import SETUPS, interleaved, judged

OVERLAPPED = [name for name, setup in SETUPS.items() if setup.model.get("overlap")]


@pytest.mark.parametrize("name", SETUPS)
def test_no_set_up_races_and_all_ranks_call_alike(pool: Any, name: str) -> None:
    (verdict,) = pool.run(judged, name, world_size=1)
    assert verdict.found == []
    assert verdict.operations > 300
    assert verdict.collectives >= 9
    momentum = SETUPS[name].compression.get("method") == "onebit_adam"  # on the optimizer's stream
    assert verdict.streams >= (3 if name in OVERLAPPED and not momentum else 2)


@pytest.mark.parametrize("of_their_own", [False, True])
def test_no_orders_of_dispatch_wait_for_one_another(pool: Any, of_their_own: bool) -> None:
    """Dense and expert buckets, whose communicators are not the same."""
    orders, name = 2, "experts in many buckets"
    (found,) = pool.run(interleaved, name, orders, 100, of_their_own=of_their_own, world_size=1)
    assert found == []


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_finds_an_error(pool: Any, name: str) -> None:
    (found,) = pool.run(found_in, name, world_size=1)
    assert any(MUTANTS[name].finding in line for line in found), found


def seconds_over_two_streams() -> list[str]:
    import torch
    from order.gpu import CUDA, recording

    from megatron_patch.collectives.workspace import Workspace

    with recording() as gpu:
        workspace = Workspace(CUDA)
        for stream in torch.cuda.Stream(), torch.cuda.Stream():
            with torch.cuda.stream(stream), workspace.timed():
                torch.zeros(3, device="cuda").add_(1)
        workspace.lap()()
        return gpu.machine.found


def test_time_on_several_streams_is_waited_for(pool: Any) -> None:
    """Dense and expert exchanges are timed by events on streams of their own."""
    assert pool.run(seconds_over_two_streams, world_size=1) == [[]]


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"runs {len(SETUPS)} set-ups, and finds each of {len(MUTANTS)} errors" in page
