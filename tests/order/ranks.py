"""What several ranks' collectives must be to one another: the same in each communicator, and free of circles.

A collective begins when all members have come to it, and a rank comes to it when what it waits for is over.
Each rank's order of "is over before" (vector clocks) is known; joined at the collectives that ranks have in
common, it must have no circle, or all wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective."""

    communicator: str
    members: tuple[int, ...]
    operation: str
    nbytes: int
    """What all members must agree on."""
    queue: int
    at: int
    """The how many-th operation of the queue it is."""
    knows: np.ndarray
    """What is over before it begins."""


def disagreements(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Where members of a communicator call unlike collectives, or in unlike order; one line each."""
    found = []
    called: dict[str, dict[int, list[Collective]]] = {}
    for rank, collectives in enumerate(ranks):
        for collective in collectives:
            called.setdefault(collective.communicator, {}).setdefault(rank, []).append(collective)
    for communicator, by_rank in called.items():
        members = next(iter(by_rank.values()))[0].members
        sequences = {
            rank: [(one.operation, one.nbytes, one.members) for one in by_rank.get(rank, [])]
            for rank in members
        }
        first = sequences[members[0]]
        for rank, sequence in sequences.items():
            if sequence != first:
                place = next(
                    (i for i, pair in enumerate(zip(first, sequence, strict=False)) if pair[0] != pair[1]),
                    min(len(first), len(sequence)),
                )
                found.append(
                    f"{communicator}: call {place} is {_call(first, place)} on rank {members[0]} and "
                    f"{_call(sequence, place)} on rank {rank}"
                )
    return found


def _call(sequence: Sequence[tuple[str, int, tuple[int, ...]]], place: int) -> str:
    return f"{sequence[place][0]} of {sequence[place][1]} bytes" if place < len(sequence) else "none"


def circle(ranks: Sequence[Sequence[Collective]]) -> list[str] | None:
    """Collectives that wait for one another in a circle; None: there are none."""
    numbers: dict[tuple[str, int], int] = {}
    parts = []
    for collectives in ranks:
        calls: Counter[str] = Counter()
        nodes = []
        for one in collectives:
            nodes.append(numbers.setdefault((one.communicator, calls[one.communicator]), len(numbers)))
            calls[one.communicator] += 1
        parts.append(np.array(nodes, dtype=np.int64))
    before = np.zeros((len(numbers), len(numbers)), dtype=bool)
    for collectives, nodes_of_rank in zip(ranks, parts, strict=True):
        if collectives:
            known = np.stack([one.knows for one in collectives])[:, [one.queue for one in collectives]]
            known = known >= np.array([one.at for one in collectives])
            before[np.ix_(nodes_of_rank, nodes_of_rank)] |= known
    np.fill_diagonal(before, False)
    remaining = np.ones(len(numbers), dtype=bool)
    while (free := remaining & ~(before & remaining).any(axis=1)).any():
        remaining &= ~free
    names = [f"{communicator}, call {number}" for communicator, number in numbers]
    return [names[node] for node in np.flatnonzero(remaining)] or None
