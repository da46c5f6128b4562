"""Outer steps between nodes: a node's own step, and its share of an exchange with bytes counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from workflows.plan.jobs import HIDDEN, cluster, job

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import methods, recommend
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import Job

LAYER = HIDDEN + 4 * HIDDEN**2
BANDWIDTH = 1e6


def seconds(one: Job, on: Cluster, name: str) -> float:
    return recommend.simulate(one, on, methods.parse(name)).seconds


@pytest.mark.parametrize(
    ("inside", "bits"), [("stock", 32.0), ("none_exact", 32.0), ("error_feedback4_exact", 4 + 16 / 128)]
)
def test_a_step_is_a_nodes_own_and_its_share_of_the_exchange(inside: str, bits: float) -> None:
    """Of an all-reduce over M nodes each sends 2 (M-1)/M of the weights, whose link is all of the time."""
    nodes, interval, layers = 4, 10, 16
    one, on = job(batch=64, layers=layers), cluster(nodes, bandwidth=BANDWIDTH)
    alone = seconds(dataclasses.replace(one, global_batch=16), cluster(1), inside)
    made = recommend.simulate(one, on, methods.parse(f"outer{interval}_{inside}"))
    sent = 2 * (nodes - 1) / nodes * layers * LAYER * bits / 8 / interval
    assert made.uplink_bytes == pytest.approx(sent, rel=0.02)
    assert made.seconds - alone == pytest.approx(sent / BANDWIDTH, rel=0.02)
    assert made.exposed > 0.98 * sent / BANDWIDTH


def test_a_delay_hides_as_much_as_its_steps_last() -> None:
    one, on, inside = job(batch=64, layers=16), cluster(4, bandwidth=BANDWIDTH), "error_feedback4_exact"
    alone = seconds(dataclasses.replace(one, global_batch=16), cluster(1), inside)
    at_once = seconds(one, on, f"outer10_{inside}")
    sent = 2 * 3 / 4 * 16 * LAYER * (4 + 16 / 128) / 8
    assert sent / BANDWIDTH > 9 * alone, "no delay hides all of it"
    # Where links take no time, only the gather is left of what a delay saves.
    no_links = cluster(4, bandwidth=float("inf"))
    gather = seconds(one, no_links, f"outer10_{inside}") - seconds(one, no_links, f"outer10d9_{inside}")
    assert gather > 0
    part = seconds(one, on, f"outer10d6_{inside}")
    assert at_once - part - gather == pytest.approx(6 * alone / 10, rel=0.001)
    in_turns = seconds(one, on, f"outer10d3_{inside}")
    assert at_once - in_turns - gather == pytest.approx(3 * 3 * alone / 10, rel=0.001)
    fast = cluster(4, bandwidth=sent / (8 * alone))
    assert seconds(one, fast, f"outer10d9_{inside}") < 1.02 * alone < seconds(one, fast, f"outer10_{inside}")


def test_experts_are_exchanged_too() -> None:
    dense, mixed = job(batch=64), job(batch=64, experts=True)
    made = [recommend.simulate(one, cluster(2), methods.parse("outer10_stock")) for one in (dense, mixed)]
    more = made[1].uplink_bytes - made[0].uplink_bytes
    # Two experts of each layer on each rank, of which 4 of the node's 8 ranks have the same.
    assert more == pytest.approx(4 / 10 * 4 * 2 * HIDDEN**2 * 2, rel=0.02)


def test_the_anchor_and_the_errors_take_memory() -> None:
    one, on = job(batch=64), cluster(2)
    names = ("stock", "outer10_stock", "outer10_error_feedback4", "outer10d6_stock", "outer10d2_stock")
    rows = recommend.rows(one, on, [methods.parse(name) for name in names])
    alone = [
        row.memory_bytes
        for row in recommend.rows(
            dataclasses.replace(one, global_batch=32),
            cluster(1),
            [methods.parse(name) for name in ("stock", "error_feedback4")],
        )
    ]
    owned = 4 * LAYER / 8
    assert rows[1].memory_bytes - alone[0] == pytest.approx(4 * owned, rel=0.01)
    assert rows[2].memory_bytes - alone[1] == pytest.approx((5 + 2 / 128) * owned, rel=0.01)
    assert rows[3].memory_bytes - alone[0] == pytest.approx((4 + 8) * owned, rel=0.01)
    assert rows[4].memory_bytes - alone[0] == pytest.approx((4 + 8 / 5) * owned, rel=0.01)


def test_another_training_is_never_recommended() -> None:
    one, on = job(batch=64), cluster(4, bandwidth=BANDWIDTH)
    names = ("stock", "loco4_exact", "outer30_error_feedback4_exact")
    rows = recommend.rows(one, on, [methods.parse(name) for name in names])
    assert rows[2].seconds < rows[1].seconds / 2
    assert recommend.advise(one, on, rows, 0.03).row.method.name == "loco4_exact"


@pytest.mark.parametrize(
    "name", ["outer1_stock", "outer30_onebit_adam", "outer3_outer3_stock", "outer5_stok", "outer5d5_stock"]
)
def test_a_name_that_is_no_method_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be"):
        methods.parse(name)


@pytest.mark.parametrize(
    ("one", "on", "words"),
    [
        (job(batch=64), cluster(1), "several nodes"),
        (job(batch=64, pipeline=2), cluster(2), "a single pipeline stage"),
        (dataclasses.replace(job(batch=64), distributed=False), cluster(2), "distributed optimizer"),
        (dataclasses.replace(job(batch=64), tensor=16), cluster(2), "a replica of the model inside"),
        (dataclasses.replace(job(batch=64), strategy="fsdp2"), cluster(2), "Megatron's DDP"),
    ],
)
def test_nodes_that_cannot_be_instances_are_refused(one: Job, on: Cluster, words: str) -> None:
    with pytest.raises(UserError, match=words):
        seconds(one, on, "outer30_stock")
