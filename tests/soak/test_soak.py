"""A run killed four times ends bit for bit as one that was left alone; `make soak` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_pool import in_warm_process
from workflows.engine_runs import prepare

from .board import Kill
from .comparison import differences
from .harness import Runs, Soak, Tally

# The aimed three need two saves after the first, whose step depends on the processor: step 30 is late enough.
STEPS = 36
KILLS = [
    Kill(rank=1, seconds=0.5),
    Kill(rank=1, point="exchange: under way", nth=12),
    Kill(rank=0, point="save: tracker emptied", nth=1),
    Kill(rank=0, point="save: files complete", nth=1),
]


def kill(folder: Path) -> None:
    """In a process of its own, as it forks ranks. Raises AssertionError."""
    prepare()
    runs, tally = Runs(Soak(folder, steps=STEPS)), Tally()
    undisturbed = runs.undisturbed()
    assert differences(undisturbed, runs.disturbed(KILLS, tally)) == []
    assert tally.kills == len(KILLS), tally
    assert tally.points["exchange: under way"] == 1, tally

    # The comparison sees what it must: here the senders' errors are not put back after step 9.
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    dist_checkpointing.restore = lambda *args: None
    found = differences(undisturbed, runs.disturbed([Kill(rank=0, point="step done", nth=10)], tally))
    assert any("step 10" in line for line in found), found


@pytest.mark.slow
def test_a_run_killed_four_times_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    in_warm_process(kill, tmp_path, log=tmp_path / "log", timeout=200)
