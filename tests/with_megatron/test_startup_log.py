"""What attaching says of the groups of ranks, and of two hops."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from with_megatron.seam_runs import built, logged

import megatron_patch


def announced(compressions: list[dict[str, Any]], flags: dict[str, Any] | None = None) -> list[list[str]]:
    """What attaching says with each compression, in a training loop of Megatron's that has these flags."""
    from megatron.training import global_vars

    found = []
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", Namespace(**flags) if flags else None):
        for compression in compressions:
            with logged() as lines:
                built({}, compression)
            megatron_patch.disable()
            found.append(lines)
    return found


TOPOLOGIES = {
    "auto": ({"ranks_per_node": 2}, "reduce-scatter in two hops over 2 nodes of 2 ranks: "),
    "asked for": ({"ranks_per_node": 2, "topology": "two_hop"}, "in two hops over 2 nodes of 2 ranks"),
    "flat": ({"ranks_per_node": 2, "topology": "flat"}, None),
    "one node, asked for": (
        {"ranks_per_node": 4, "topology": "two_hop"},
        "one hop, not two, for a group of ranks: all of its ranks are on one node",
    ),
    "irregular": (
        {"ranks_per_node": 3},
        "one hop, not two, for a group of ranks: its ranks lie irregularly on nodes of 3: 3 on node 0, 1 on",
    ),
}


def test_the_topology_is_said_and_so_is_why_not_two_hops(pool):
    first, *others = pool.run(announced, [compression for compression, _ in TOPOLOGIES.values()])
    assert not any(lines for of_rank in others for lines in of_rank)
    for lines, (_, line) in zip(first, TOPOLOGIES.values(), strict=True):
        hops = [text for text in lines if "hop" in text]
        assert len(hops) == (1 if line else 0)
        assert line is None or line in hops[0]


def test_error_feedback_with_few_bits_from_the_first_step_on_is_warned_of(pool):
    compressions = {
        "start": {"bits": 4},
        "method": {"bits": 2, "method": "naive"},
        "auto": {"bits": 2, "method": "loco", "start_step": "auto"},
        "loco": {"bits": 2, "method": "loco", "start_step": 0},
        "error_feedback": {"bits": 2, "method": "error_feedback", "start_step": 0},
        "later": {"bits": 2, "method": "error_feedback", "start_step": 1},
    }
    found = pool.run(announced, list(compressions.values()), world_size=2)[0]
    warned = [name for name, lines in zip(compressions, found, strict=True) if "first step on" in str(lines)]
    assert warned == ["loco", "error_feedback"]


def test_compression_within_the_warm_up_is_warned_of(pool):
    compressions = [
        *({"bits": 4, "start_step": start} for start in ("auto", 0, 119, 120)),
        {"method": "none"},
        {"method": "onebit_adam", "warmup_steps": 5},
    ]
    flags = {"lr_warmup_fraction": 0.12, "train_iters": 1000, "global_batch_size": 8}
    found = pool.run(announced, compressions, flags, world_size=2)[0]
    warnings = [[line for line in lines if "warm-up of 120 steps" in line] for lines in found]
    assert [len(lines) for lines in warnings] == [0, 1, 1, 0, 0, 0]
    assert all("start_step auto, the default" in line for lines in warnings for line in lines)


STARTS = [
    ({"bits": 4, "start_step": "auto"}, "when the learning rate has stopped rising: expected at step 123"),
    ({"bits": 4, "start_step": 120}, "after 120 optimizer steps"),
    ({"bits": 4, "start_step": 0}, None),
    ({"method": "none"}, None),
    ({"method": "onebit_adam", "warmup_steps": 5}, None),
]


def test_the_log_says_when_compression_is_expected_to_start(pool):
    flags = {"optimizer": "adam", "lr_warmup_iters": 120, "train_iters": 1000, "global_batch_size": 8}
    compressions = [compression for compression, _ in STARTS]
    first, other = pool.run(announced, compressions, flags, world_size=2)
    assert not any(other)
    for lines, (_, line) in zip(first, STARTS, strict=True):
        starts = [text for text in lines if "compression starts " in text and "within" not in text]
        assert [f"compression starts {line}" in text for text in starts] == [True] * (line is not None)
    without = pool.run(announced, compressions[:1], world_size=2)[0][0]
    assert any("stopped rising" in text for text in without)
    assert not any("expected" in text for text in without), "no flags are seen"


def outer_line(**options: Any) -> str:
    from megatron_patch.megatron.startup_log import _outer_line

    bucket = SimpleNamespace(grad_data=torch.empty(2_000_000, device="meta"))
    group = SimpleNamespace(intra_distributed_optimizer_instance_size=2, buckets=[bucket])
    config = megatron_patch.CompressionConfig(outer_interval=30, **options)
    return _outer_line(config, [SimpleNamespace(group=group)])


def test_outer_steps_say_what_they_take(pool: Any) -> None:
    (line,) = pool.run(outer_line, outer_momentum=0.0, world_size=1)
    assert "average 1,000,000 weights a rank every 30 steps (rate 1.0, momentum 0.0), in 4 bits; " in line
    assert "this takes 4 MB a rank. With Adam, multiply the learning rate by the square root" in line
    (late,) = pool.run(outer_line, outer_momentum=0.9, outer_delay=15, world_size=1)
    assert "in 1 turn, each overlapped with 15 steps; this takes 8 MB a rank, and 8 bytes for" in late
