"""What attaching says of the groups of ranks, and of two hops.

On Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from with_megatron.seam_runs import built, logged


def announced(compression: dict[str, Any]) -> list[str]:
    """What attaching says."""
    import megatron_patch

    with logged() as lines:
        built({}, compression)
    megatron_patch.disable()
    return lines


TOPOLOGIES = {
    "unknown": ({}, None),
    "auto": ({"ranks_per_node": 2}, "reduce-scatter in two hops over 2 nodes of 2 ranks: "),
    "asked for": ({"ranks_per_node": 2, "topology": "two_hop"}, "in two hops over 2 nodes of 2 ranks"),
    "flat": ({"ranks_per_node": 2, "topology": "flat"}, None),
    "one node": ({"ranks_per_node": 4}, None),
    "one node, asked for": (
        {"ranks_per_node": 4, "topology": "two_hop"},
        "one hop, not two, for a group of ranks: all of its ranks are on one node",
    ),
    "irregular": (
        {"ranks_per_node": 3},
        "one hop, not two, for a group of ranks: its ranks lie irregularly on nodes of 3: 3 on node 0, 1 on",
    ),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_topology_is_said_and_so_is_why_not_two_hops(pool, name):
    compression, line = TOPOLOGIES[name]
    lines, *others = pool.run(announced, compression)
    assert not any(others)
    hops = [text for text in lines if "hop" in text]
    assert len(hops) == (1 if line else 0)
    if line:
        assert line in hops[0]


@pytest.mark.parametrize(
    ("compression", "warned"),
    [
        ({"bits": 4}, False),
        ({"bits": 2, "method": "naive"}, False),
        ({"bits": 2, "method": "loco", "start_step": "auto"}, False),
        ({"bits": 2, "method": "loco", "start_step": 0}, True),
        ({"bits": 2, "method": "error_feedback", "start_step": 0}, True),
        ({"bits": 2, "method": "error_feedback", "start_step": 1}, False),
    ],
)
def test_error_feedback_with_few_bits_from_the_first_step_on_is_warned_of(pool, compression, warned):
    lines = pool.run(announced, compression)[0]
    assert any("from the first step on" in line for line in lines) == warned


def announced_under(flags: dict[str, Any], compression: dict[str, Any]) -> list[str]:
    """What attaching says in a job of Megatron's training loop with these flags."""
    from megatron.training import global_vars

    before, global_vars._GLOBAL_ARGS = global_vars._GLOBAL_ARGS, Namespace(**flags)
    try:
        return announced(compression)
    finally:
        global_vars._GLOBAL_ARGS = before


@pytest.mark.parametrize(
    ("compression", "warned"),
    [
        ({"bits": 4, "start_step": "auto"}, False),
        ({"bits": 4, "start_step": 0}, True),
        ({"bits": 4, "start_step": 119}, True),
        ({"bits": 4, "start_step": 120}, False),
        ({"method": "none"}, False),
        ({"method": "onebit_adam", "warmup_steps": 5}, False),
    ],
)
def test_compression_within_the_warm_up_is_warned_of(pool, compression, warned):
    flags = {"lr_warmup_fraction": 0.12, "train_iters": 1000, "global_batch_size": 8}
    lines = pool.run(announced_under, flags, compression)[0]
    found = [line for line in lines if "warm-up of 120 steps" in line]
    assert len(found) == warned
    assert all("start_step auto, the default" in line for line in found)


AUTO = {"bits": 4, "start_step": "auto"}


@pytest.mark.parametrize(
    ("compression", "line"),
    [
        (AUTO, "compression starts when the learning rate has stopped rising: expected at step 123"),
        ({"bits": 4, "start_step": 120}, "compression starts after 120 optimizer steps"),
        ({"bits": 4, "start_step": 0}, None),
        ({"method": "none"}, None),
        ({"method": "onebit_adam", "warmup_steps": 5}, None),
    ],
)
def test_the_log_says_when_compression_is_expected_to_start(pool, compression, line):
    flags = {"optimizer": "adam", "lr_warmup_iters": 120, "train_iters": 1000, "global_batch_size": 8}
    lines, *others = pool.run(announced_under, flags, compression)
    assert not any(others)
    starts = [text for text in lines if "compression starts " in text and "within" not in text]
    assert len(starts) == (line is not None)
    assert all(line in text for text in starts)
    without = [text for text in pool.run(announced, compression)[0] if "stopped rising" in text]
    assert len(without) == (compression == AUTO)
    assert not any("expected" in text for text in without), "no flags are seen"
