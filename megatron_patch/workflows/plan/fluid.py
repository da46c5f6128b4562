"""Tasks that share resources: a discrete-event simulation in which rates change only when a task begins or
ends.

A task needs amounts of resources (processor seconds, bytes of a link), all of which it uses up evenly; it
waits for others, for its place on a stream (where one task runs after the other), and for a latency of its
own. Tasks that need the same resource share it evenly; what one cannot use, because another resource holds
it up, the others get (as TCP's flows and a GPU's streams about do).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_DONE = 1e-9
"""What rounding may leave of a task that is done."""


@dataclass(eq=False)
class Task:
    """Something that takes time.

    `needs` are amounts by resource; `latency` seconds pass before, in which nothing is used; `after` must
    have ended; tasks of one `stream` run in the order in which they are listed.
    """

    name: str
    needs: Mapping[str, float] = field(default_factory=dict)
    after: Sequence[Task] = ()
    stream: str = ""
    latency: float = 0.0
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """From its start to its end, once `run` is through."""
        return self.end - self.start


def run(tasks: Sequence[Task], capacity: Mapping[str, float]) -> float:
    """Set every task's `start` and `end`; returns when the last one ends.

    Args:
        tasks: in an order in which each comes behind those it waits for.
        capacity: of every resource, a second.
    """
    waiting, followers = _dependencies(tasks)
    position = {task: place for place, task in enumerate(tasks)}
    ready = [task for task in tasks if not waiting[task]]
    delayed: list[tuple[float, int, Task]] = []
    rest: dict[Task, float] = {}
    now = last = 0.0

    def begin(task: Task) -> None:
        task.start = now
        if task.latency > 0:
            heapq.heappush(delayed, (now + task.latency, position[task], task))
        else:
            arrive(task)

    def arrive(task: Task) -> None:
        if any(amount > 0 for amount in task.needs.values()):
            rest[task] = 1.0
        else:
            finish(task)

    def finish(task: Task) -> None:
        nonlocal last
        task.end = now
        last = max(last, now)
        for follower in followers[task]:
            waiting[follower] -= 1
            if not waiting[follower]:
                begin(follower)

    for task in ready:
        begin(task)
    while rest or delayed:
        rates = fair_rates([task.needs for task in rest], capacity) if rest else []
        step = min(
            (left / rate for left, rate in zip(rest.values(), rates, strict=True)), default=float("inf")
        )
        if delayed and delayed[0][0] <= now + step:
            step = delayed[0][0] - now
        now += step
        ended = []
        for task, rate in zip(list(rest), rates, strict=True):
            rest[task] -= rate * step
            if rest[task] <= _DONE:
                ended.append(task)
        for task in ended:
            del rest[task]
        while delayed and delayed[0][0] <= now:
            arrive(heapq.heappop(delayed)[2])
        for task in ended:
            finish(task)
    return last


def _dependencies(tasks: Sequence[Task]) -> tuple[dict[Task, int], dict[Task, list[Task]]]:
    """How many tasks each one waits for, and which ones wait for it."""
    waiting = {task: len(task.after) for task in tasks}
    followers: dict[Task, list[Task]] = {task: [] for task in tasks}
    on_stream: dict[str, Task] = {}
    for task in tasks:
        for before in task.after:
            followers[before].append(task)
        if task.stream:
            if task.stream in on_stream:
                followers[on_stream[task.stream]].append(task)
                waiting[task] += 1
            on_stream[task.stream] = task
    return waiting, followers


def fair_rates(needs: Sequence[Mapping[str, float]], capacity: Mapping[str, float]) -> list[float]:
    """The share that is done in a second of each of the tasks that run together.

    Their use of what they share rises alike, until a resource is full, whose users stay there, or until a
    task is held up by what it has alone; the others go on rising (progressive filling). On a single link
    that is an equal share for every flow; of a processor, what needs little of it gets that.
    """
    alone = [min(capacity[r] / amount for r, amount in one.items() if amount > 0) for one in needs]
    users: dict[str, list[int]] = {}
    for place, amounts in enumerate(needs):
        for resource, amount in amounts.items():
            if amount > 0:
                users.setdefault(resource, []).append(place)
    users = {resource: found for resource, found in users.items() if len(found) > 1}
    rates = list(alone)
    open_ = sorted({place for found in users.values() for place in found})
    left = {resource: capacity[resource] for resource in users}
    speed = {
        place: 1 / max(needs[place].get(r, 0.0) / capacity[r] for r in users if needs[place].get(r, 0.0) > 0)
        for place in open_
    }  # at which a task uses all of the shared resource that it needs most of
    while open_:
        levels: dict[str | int, float] = {place: alone[place] / speed[place] for place in open_}
        for resource, found in users.items():
            wanted = sum(needs[place][resource] * speed[place] for place in found if place in open_)
            if wanted > 0:
                levels[resource] = left[resource] / wanted
        first = min(levels, key=lambda key: levels[key])
        settled = [first] if isinstance(first, int) else [place for place in users[first] if place in open_]
        for place in settled:
            rates[place] = speed[place] * levels[first]
            open_.remove(place)
            for resource in users:
                left[resource] = max(0.0, left[resource] - needs[place].get(resource, 0.0) * rates[place])
    return rates
