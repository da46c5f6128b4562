"""Computes when the tasks of a step begin and end, each at the moment when it is placed.

A task waits for other tasks, for the one before it on its stream, and for a latency of its own. Then it uses
links and the rank's processor, each of which serves one task after the other. Two tasks never share a link:
one after the other, they take as long in sum as they would together, and the first one ends earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a step, with its times in seconds from the beginning of the step."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The time from its start to its end, including waits for resources."""
        return self.end - self.start


@dataclass
class Timeline:
    """The tasks of a step in the order in which they were placed.

    `capacity` says what each resource does in a second.
    """

    capacity: Mapping[str, float]
    tasks: list[Task] = field(default_factory=list)
    _streams: dict[str, float] = field(default_factory=dict)
    _busy: dict[str, float] = field(default_factory=dict)

    def place(
        self,
        name: str,
        needs: Mapping[str, float],
        after: Sequence[Task],
        stream: str = "",
        latency: float = 0.0,
        at_once: bool = False,
    ) -> Task:
        """Place a task that needs amounts of resources (processor seconds, bytes of a link).

        With `at_once` it does not wait for tasks that use its resources; tasks placed after it wait longer.
        """
        start = max([self._streams.get(stream, 0.0), *(task.end for task in after)])
        begun = end = start + latency
        for resource, amount in needs.items():
            if amount > 0:
                busy, seconds = self._busy.get(resource, 0.0), amount / self.capacity[resource]
                self._busy[resource] = busy + seconds if at_once else max(busy, begun) + seconds
                end = max(end, begun + seconds if at_once else self._busy[resource])
        if stream:
            self._streams[stream] = end
        self.tasks.append(Task(name, start, end))
        return self.tasks[-1]

    @property
    def end(self) -> float:
        """The time at which the last task ends."""
        return max((task.end for task in self.tasks), default=0.0)
