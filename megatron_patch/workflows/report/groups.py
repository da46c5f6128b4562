"""Runs that differ in their seeds alone are one configuration: one colour, one row, one column.

group_runs(runs)      runs -> groups of runs, named by the shortest part of their paths that tells them apart
differences(groups)   the settings in which runs differ, with what each group has
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patch.workflows.report.runs import Run

SEEDS = ("megatron.seed", "compression.seed")
_SEED_FOLDER = re.compile(r"seed[-_=]?\d+")
_ABSENT = "not set"


@dataclass(frozen=True)
class Group:
    """Runs of one configuration."""

    name: str
    runs: list[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs that means are made of.

        Runs that came to their end are not mixed with others: a loss at half of the steps is something else.
        """
        return [run for run in self.runs if run.finished] or self.runs


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their first runs.

    Runs of equal settings and equal seeds stay apart, and so does all that has these settings: they were
    made at different times or by different code, and which of them belong together only the user knows.
    """
    alike: dict[Any, list[Run]] = {}
    for run in runs:
        alike.setdefault(_settings(run), []).append(run)
    groups: list[list[Run]] = []
    for run in runs:
        members = alike[_settings(run)]
        if len({repr(member.seed) for member in members}) < len(members):
            groups.append([run])
        elif run is members[0]:
            groups.append(members)
    return [Group(name, members) for name, members in zip(_names(groups), groups, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each single run."""
    return _shortest_ends([_parts(run) for run in runs])


def _settings(run: Run) -> Any:
    if not run.config:
        return run.path
    return tuple(sorted((key, repr(value)) for key, value in run.config.items() if key not in SEEDS))


def _parts(run: Run) -> tuple[str, ...]:
    return run.path.resolve().parts[1:]


def _names(groups: list[list[Run]]) -> list[str]:
    shared = [_shared_parts([_parts(run) for run in runs]) for runs in groups]
    if len(set(shared)) == len(shared) and all(shared):
        return _shortest_ends(shared)
    firsts = run_names([runs[0] for runs in groups])
    return [
        name if len(runs) == 1 else f"{name} and {len(runs) - 1} more"
        for name, runs in zip(firsts, groups, strict=True)
    ]


def _shared_parts(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The parts of a path that name the configuration: not those of a single seed."""
    if len({len(path) for path in paths}) > 1:
        return paths[0]
    columns = zip(*paths, strict=True)
    return tuple(
        column[0] for column in columns if len(set(column)) == 1 and not _SEED_FOLDER.fullmatch(column[0])
    )


def _shortest_ends(paths: list[tuple[str, ...]]) -> list[str]:
    """As few last parts of the paths as tell them apart, without the parts in which all of them end."""
    if len(paths) > 1:
        while min(map(len, paths)) > 1 and len({path[-1] for path in paths}) == 1:
            paths = [path[:-1] for path in paths]
    depth, longest = 1, max(map(len, paths))
    while depth < longest and len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path[-depth:]) for path in paths]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Key -> its value in each group, of the keys that have not the same value in all runs."""
    recorded = [run for group in groups for run in group.runs if run.config]
    keys = dict.fromkeys(key for run in recorded for key in run.config)
    return {
        key: [_values(group, key) for group in groups]
        for key in keys
        if len({_shown(run, key) for run in recorded}) > 1
    }


def _values(group: Group, key: str) -> str:
    return ", ".join(dict.fromkeys(_shown(run, key) for run in group.runs))


def _shown(run: Run, key: str) -> str:
    """A value as YAML writes it."""
    if not run.config:
        return "not recorded"
    if key not in run.config:
        return _ABSENT
    value = run.config[key]
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
