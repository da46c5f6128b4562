"""A step: closed forms of simple cases, and what must hold for any job and cluster."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workflows.plan.jobs import cluster, job

from megatron_patch.workflows.plan import methods
from megatron_patch.workflows.plan.cluster import Cluster, Link
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.plan.methods import parse
from megatron_patch.workflows.plan.step import Timeline, added_bytes, forward_seconds, simulate

ALL = ("stock", "none_exact", "loco4_exact", "loco4_flat_exact", "onebit_adam")


def computing(one: Job, on: Cluster) -> float:
    operations = sum(stage.operations for stage in one.stages) / one.pipeline
    return 3 * forward_seconds(one, on, operations)


def test_without_bytes_and_kernels_a_step_is_its_arithmetic() -> None:
    one, on = job(batch=64), cluster(nodes=2)
    on = dataclasses.replace(on, processor=dataclasses.replace(on.processor, optimizer=0.0), call_latency=0.0)
    on = dataclasses.replace(on, between=Link(1e9), inside=Link(1e10))
    batches = one.microbatches(on.world)
    assert batches == 4
    assert simulate(one, on, methods.FREE).seconds == pytest.approx(batches * computing(one, on))


def test_a_pipelines_bubble_is_that_of_one_forward_one_backward() -> None:
    one = job(batch=128, pipeline=4)
    on = cluster(nodes=2, latency=0.0)
    on = dataclasses.replace(on, processor=dataclasses.replace(on.processor, optimizer=0.0))
    batches, stages = one.microbatches(on.world), 4
    whole = computing(dataclasses.replace(one, pipeline=1, stages=one.stages[:1]), on)
    found = simulate(one, on, methods.FREE).seconds
    assert found == pytest.approx((batches + stages - 1) * whole, rel=1e-6)
    interleaved = dataclasses.replace(one, virtual=2)
    assert simulate(interleaved, on, methods.FREE).seconds < found


def test_a_pipeline_waits_for_what_its_stages_send() -> None:
    """With few bytes the last stage's microbatches wait, and the first and last through all stages."""
    one = job(batch=128, pipeline=4)
    sending = dataclasses.replace(one, passed_bytes=1000.0)
    for nodes, per_node in ((8, 2), (2, 8)):
        on = cluster(nodes=nodes, per_node=per_node, latency=0.0)
        on = dataclasses.replace(on, processor=dataclasses.replace(on.processor, optimizer=0.0))
        between = nodes == 8
        assert sending.passes_between_nodes(on) == between
        each = 1000 * 2 / on.between.bandwidth if between else 1000 / on.inside.bandwidth
        for virtual, waits in ((1, one.microbatches(on.world) - 1 + 2 * 3), (2, 2 * 3)):
            base, found = (
                simulate(dataclasses.replace(this, virtual=virtual), on, methods.FREE).seconds
                for this in (one, sending)
            )
            assert found - base == pytest.approx(waits * each, rel=1e-4)


def test_an_all_reduce_is_two_rings_and_gathers_nothing() -> None:
    one = dataclasses.replace(job(batch=16, overlap=False), gradient_bytes=2)
    on = cluster(nodes=16, per_node=1, latency=0.0)
    replicated = parse("stock_allreduce")
    base = simulate(one, on, dataclasses.replace(methods.FREE, distributed=False)).seconds
    numel = sum(parameter.numel for parameter in one.stages[0].parameters)
    each = 2 * numel * (15 / 16) / on.between.bandwidth
    assert simulate(one, on, replicated).seconds - base == pytest.approx(2 * each, rel=1e-3)
    scattering = simulate(one, on, parse("stock")).seconds - simulate(one, on, methods.FREE).seconds
    assert scattering == pytest.approx(2 * each, rel=1e-3)


def test_the_memory_that_a_method_adds() -> None:
    one, on = job(batch=16), cluster(nodes=4, per_node=4)
    numel = sum(parameter.numel for parameter in one.stages[0].parameters)
    added = {name: added_bytes(one, on, parse(name)) for name in methods.DEFAULT}
    error = 1 + 2 / 128
    assert added["stock"] == 0
    assert added["none_exact"] == pytest.approx(4 / 16 * numel)
    assert added["stock_bf16"] == pytest.approx(-2 * numel)
    assert added["loco4_exact"] - added["loco4"] == pytest.approx(4 / 16 * numel)
    naive = added_bytes(one, on, parse("naive4"))
    assert added["loco4"] - naive == pytest.approx(error / 4 * numel)
    whole = dataclasses.replace(one, distributed=False)
    kept = added_bytes(whole, on, parse("loco4")) - added_bytes(whole, on, parse("naive4"))
    assert kept == pytest.approx((error / 4 + error / 16) * numel), "an owner's error in an all-reduce, too"
    first, second, *_ = sorted((bucket.elements for bucket in one.buckets(0, on, False)), reverse=True)
    coded = (first + second) / 4 * 4.125 / 8
    table = 12 / 128 * numel / 4
    assert naive == pytest.approx(2 * coded + first / 4 * one.gradient_bytes + table, rel=0.01)
    assert added["onebit_adam"] > (4 + error / 4 + error / 16 + 4 / 16) * numel


def test_two_hops_send_a_quarter_of_what_four_ranks_a_node_send_flat() -> None:
    one, on = job(batch=16), cluster(nodes=4, per_node=4)
    two, flat = simulate(one, on, parse("loco4")), simulate(one, on, parse("loco4_flat"))
    weights = 15 / 16 * 2 * sum(bucket.elements for bucket in one.buckets(0, on, False))
    assert (two.uplink_bytes - weights) / (flat.uplink_bytes - weights) == pytest.approx(1 / 4, rel=0.01)


@pytest.mark.parametrize("name", ALL)
@given(
    nodes=st.sampled_from((1, 2, 4, 8)),
    per_node=st.sampled_from((1, 2, 8)),
    count=st.sampled_from((1, 2, 8)),
    pipeline=st.sampled_from((1, 2)),
    experts=st.booleans(),
    overlap=st.booleans(),
    bandwidth=st.floats(1e7, 1e11),
)
@settings(max_examples=12, deadline=None)
def test_more_bandwidth_and_faster_kernels_are_never_slower(
    name: str, nodes: int, per_node: int, count: int, pipeline: int, bandwidth: float, **kinds: bool
) -> None:
    if nodes * per_node < 2 * pipeline:
        return
    replicas = nodes * per_node // pipeline
    one = job(batch=replicas * count, pipeline=pipeline, **kinds)
    on = cluster(nodes=nodes, per_node=per_node, bandwidth=bandwidth)
    method = parse(name)
    found = simulate(one, on, method)
    free = simulate(one, on, methods.FREE).seconds
    assert found.seconds >= free * (1 - 1e-9)
    assert found.exposed == pytest.approx(found.seconds - free, abs=1e-9 + 1e-6 * free)
    assert simulate(one, on.with_inter(3 * bandwidth), method).seconds <= found.seconds * (1 + 1e-6)
    wider = dataclasses.replace(on, inside=dataclasses.replace(on.inside, bandwidth=2 * on.inside.bandwidth))
    assert simulate(one, wider, method).seconds <= found.seconds * (1 + 1e-6)
    assert found.seconds >= found.uplink_bytes / on.between.bandwidth / pipeline * (1 - 1e-9)


def test_buckets_start_while_backward_computes_and_no_more_than_two_are_under_way() -> None:
    one, on = job(batch=16, layers=12), cluster(nodes=4, per_node=4, bandwidth=1e8)
    step = simulate(one, on, parse("loco4_flat"))
    tasks = {task.name: task for task in step.tasks}
    backward = max(task.end for task in step.tasks if task.name == "backward")
    buckets = len(one.buckets(0, on, False))
    assert buckets > 4
    assert tasks["dense bucket 0: all_to_all"].start < backward
    for number in range(2, buckets):
        assert (
            tasks[f"dense bucket {number}: compress"].start
            >= tasks[f"dense bucket {number - 2}: decompress"].end
        )


def test_fp32_accumulation_drains_each_bucket_before_the_next() -> None:
    one = dataclasses.replace(job(batch=16, layers=12), fp32_accumulation=True)
    step = simulate(one, cluster(nodes=4, per_node=4, bandwidth=1e8), parse("stock"))
    tasks = {task.name: task for task in step.tasks}
    assert tasks["dense bucket 1: all_to_all"].start >= tasks["dense bucket 0: sum"].end


def test_a_part_waits_for_others_for_its_stream_and_for_its_latency() -> None:
    line = Timeline({"processor": 1.0, "link": 100.0})
    first = line.place("first", {"processor": 2.0}, (), "compute")
    second = line.place("second", {"processor": 1.0}, (), "compute")
    sent = line.place("sent", {"link": 300.0}, [first], "network", latency=0.5)
    assert (first.end, second.start, second.end) == (2.0, 2.0, 3.0)
    assert (sent.start, sent.end) == (2.0, 5.5)
    assert line.end == 5.5


def test_a_resource_serves_in_turn_and_what_is_served_at_once_delays_what_follows() -> None:
    line = Timeline({"link": 100.0})
    assert line.place("bulk", {"link": 400.0}, (), "a").end == 4.0
    assert line.place("small", {"link": 100.0}, (), "b", at_once=True).end == 1.0
    assert line.place("later", {"link": 100.0}, (), "c").end == 6.0


def test_the_slowest_of_a_parts_resources_decides() -> None:
    line = Timeline({"link": 100.0, "processor": 0.5})
    assert line.place("one", {"link": 100.0, "processor": 2.0}, ()).end == 4.0
