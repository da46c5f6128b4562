"""The engine: closed forms, conservation, and properties of random task graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.workflows.plan.fluid import Task, fair_rates, run


def test_a_task_takes_its_latency_and_its_slowest_resource() -> None:
    task = Task("one", {"link": 300.0, "processor": 2.0}, latency=0.5)
    assert run([task], {"link": 100.0, "processor": 1.0}) == pytest.approx(3.5)
    assert (task.start, task.seconds) == (0.0, pytest.approx(3.5))


def test_a_stream_runs_one_after_the_other_and_others_beside_it() -> None:
    first, second = Task("a", {"x": 1.0}, stream="s"), Task("b", {"x": 1.0}, stream="s")
    beside = Task("c", {"y": 1.5})
    last = Task("d", {"y": 1.0}, after=[second, beside])
    assert run([first, second, beside, last], {"x": 1.0, "y": 1.0}) == pytest.approx(3.0)
    assert (second.start, last.start) == (pytest.approx(1.0), pytest.approx(2.0))


def test_two_flows_share_a_link_and_the_longer_one_then_has_it_alone() -> None:
    short, long = Task("short", {"link": 100.0}), Task("long", {"link": 300.0})
    assert run([short, long], {"link": 100.0}) == pytest.approx(4.0)
    assert short.end == pytest.approx(2.0)


def test_what_one_flow_cannot_use_the_others_get() -> None:
    # The first is held to 1/10 by its own link; the second takes what remains of the common one.
    rates = fair_rates([{"own": 1.0, "common": 1.0}, {"common": 1.0}], {"own": 0.1, "common": 1.0})
    assert rates == pytest.approx([0.1, 0.9])


def test_nothing_to_do_takes_no_time() -> None:
    assert run([Task("a"), Task("b", {"x": 0.0})], {"x": 1.0}) == 0.0
    assert run([], {}) == 0.0


RESOURCES = ("a", "b", "c")
amounts = st.dictionaries(st.sampled_from(RESOURCES), st.floats(0.01, 100), max_size=3)
capacities = st.fixed_dictionaries({name: st.floats(0.1, 50) for name in RESOURCES})


@given(st.lists(amounts, min_size=1, max_size=6), capacities)
@settings(max_examples=150, deadline=None)
def test_rates_are_feasible_and_every_task_is_held_up_by_a_full_resource(
    needs: list[dict[str, float]], capacity: dict[str, float]
) -> None:
    needs = [one or {"a": 1.0} for one in needs]
    rates = fair_rates(needs, capacity)
    used = {
        name: sum(one.get(name, 0.0) * rate for one, rate in zip(needs, rates, strict=True))
        for name in RESOURCES
    }
    for name in RESOURCES:
        assert used[name] <= capacity[name] * (1 + 1e-9)
    for one, rate in zip(needs, rates, strict=True):
        assert rate > 0
        assert any(used[name] >= capacity[name] * (1 - 1e-6) for name in one)


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[dict[str, float], list[int], str, float]]:
    return [
        (
            draw(amounts),
            draw(st.lists(st.integers(0, place - 1), max_size=2, unique=True)) if place else [],
            draw(st.sampled_from(("", "s", "t"))),
            draw(st.sampled_from((0.0, 0.3))),
        )
        for place in range(draw(st.integers(1, 12)))
    ]


def made(graph: list[tuple[dict[str, float], list[int], str, float]]) -> list[Task]:
    tasks: list[Task] = []
    for place, (needs, after, stream, latency) in enumerate(graph):
        tasks.append(Task(str(place), needs, [tasks[other] for other in after], stream, latency))
    return tasks


@given(graphs(), capacities)
@settings(max_examples=100, deadline=None)
def test_work_is_conserved_and_order_is_kept(
    graph: list[tuple[dict[str, float], list[int], str, float]], capacity: dict[str, float]
) -> None:
    tasks = made(graph)
    end = run(tasks, capacity)
    for name in RESOURCES:
        assert sum(task.needs.get(name, 0.0) for task in tasks) <= end * capacity[name] * (1 + 1e-6) + 1e-9
    for task in tasks:
        alone = task.latency + max((task.needs[n] / capacity[n] for n in task.needs), default=0.0)
        assert task.seconds >= alone * (1 - 1e-6)
        assert all(before.end <= task.start + 1e-9 for before in task.after)
    for stream in ("s", "t"):
        on = [task for task in tasks if task.stream == stream]
        assert all(one.end <= two.start + 1e-9 for one, two in pairwise(on))
