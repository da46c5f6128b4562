"""On a GPU the exchanges' work is in order: no race, no early free, and all ranks call alike.

No GPU runs here. The package's own code, under Megatron's or PyTorch's, launches and waits as on one, and
accounts are kept of it (machine.py); 8 ranks are made one after the other.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from order.gpu import CUDA, recording
from order.mutants import MUTANTS, found_in
from order.recorded_collectives import Recorder, recorded
from order.setups import SETUPS, interleaved, judged

from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.pytorch.fsdp2 import Hybrid
from megatron_patch.session.session import Session

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


def freed_behind_the_hook(held: bool) -> list[str]:
    """FSDP2's hybrid all-reduce as torch up to 2.14 calls it: the reduce-scatter's output, cast, is freed."""
    # Gloo's thread may hold a tensor for a moment after its collective was waited for.
    with recording() as gpu, recorded(Recorder(gpu)):
        config = CompressionConfig(method="none")
        hybrid = Hybrid.__new__(Hybrid)
        hybrid._session, hybrid._ranks = Session(config, CUDA), dist.group.WORLD
        hybrid._check = lambda: None
        one = SimpleNamespace(size=lambda: 1)
        hybrid.group = SimpleNamespace(
            shard_group=one, all_reduces=True, divide_factor=1.0, partial_for=lambda output: None
        )
        scatters, reduces = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(scatters):
            output = torch.zeros(300, device="cuda")
        reduces.wait_stream(scatters)
        unheld = mock.patch.object(torch.Tensor, "record_stream", mock.Mock())
        with torch.cuda.stream(reduces):
            with contextlib.nullcontext() if held else unheld:
                hybrid.all_reduce(output)
            gradient = output.to(torch.bfloat16)
        del output
        found = list(gpu.machine.found)
        gpu.machine.found.clear()
        del gradient
        return found


def test_what_fsdp2_frees_is_held_for_the_all_reduce_s_stream(pool: Any) -> None:
    assert pool.run(freed_behind_the_hook, True, world_size=1) == [[]]
    ((unguarded,),) = pool.run(freed_behind_the_hook, False, world_size=1)
    assert "freed" in unguarded


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert (
        f"runs {len(SETUPS)} set-ups, of Megatron, DDP and FSDP2, and finds each of {len(MUTANTS)} errors"
        in page
    )
