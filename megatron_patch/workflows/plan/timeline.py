"""When the parts of a step begin and end, by recurrence: each is placed as soon as it is known.

A part waits for others, for the one before it on its stream, and for a latency of its own. Then it uses links
and the rank's processor, each of which serves what comes to it in turn. No two parts share a link: what two
streams send at the same time takes as long in sum, and the first one is through earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Task:
    """One part of a step; times in seconds from the step's beginning."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """From its start to its end, what it waited for on its way included."""
        return self.end - self.start


@dataclass
class Timeline:
    """The parts of a step, in the order in which they were placed.

    `capacity` is what each resource does in a second.
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
        """Place a part that needs amounts of resources (processor seconds, bytes of a link).

        What is served `at_once` waits for nothing that is under way; what is placed after it waits longer.
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
        """When the last part ends."""
        return max((task.end for task in self.tasks), default=0.0)
