"""When parts of a step begin and end: cases by hand, and what must hold for any of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.workflows.plan.step import Task, Timeline


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


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", ""]),
            st.dictionaries(st.sampled_from(["x", "y"]), st.floats(0, 10)),
            st.floats(0, 3),
            st.lists(st.integers(0, 50), max_size=3),
        ),
        max_size=12,
    ),
    st.floats(0.1, 10),
)
def test_no_resource_serves_more_than_it_can_and_twice_the_speed_is_never_slower(
    parts: list[tuple[str, dict[str, float], float, list[int]]], speed: float
) -> None:
    def placed(speed: float) -> Timeline:
        line = Timeline({"x": speed, "y": speed})
        made: list[Task] = []
        for number, (stream, needs, latency, after) in enumerate(parts):
            before = [made[other % number] for other in after] if number else []
            made.append(line.place(str(number), needs, before, stream, latency))
            assert made[-1].start >= max([0.0, *(task.end for task in before)])
        return line

    line = placed(speed)
    for resource in ("x", "y"):
        used = sum(needs.get(resource, 0.0) for _, needs, _, _ in parts)
        assert line.end >= used / speed * (1 - 1e-9)
    assert placed(2 * speed).end <= line.end * (1 + 1e-9)
    assert line.end == pytest.approx(max([0.0, *(task.end for task in line.tasks)]))
