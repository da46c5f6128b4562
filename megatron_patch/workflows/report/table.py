"""Makes the page's tables, in which runs that differ only in their seeds are one row: a group.

group_runs(runs)      makes the groups, named by the shortest parts of their paths that distinguish them
row(...)              gives the numbers of a run, or the means of a group
differences(groups)   gives the settings in which runs differ, with each group's value
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patch.workflows.run_reader import UNCOMPRESSED, Run

SEEDS = ("megatron.seed", "compression.seed")
NOTHING = "–"
_SEED_FOLDER = re.compile(r"seed[-_=]?\d+")
RAW_GATHERS = {
    "forced": "forced, by an evaluation or a checkpoint",
    "inside_step": "dispatched inside the optimizer's step",
    "not_coded": "with no step before it",
    "copies_differ": "ranks' copies differed",
    "no_shorter": "the code saved nothing",
    "edited": "weights changed between step and gather",
    "off": "a step with Megatron's own gather (trial, or weight_gather auto)",
}
"""The RAW_REASONS of megatron/seams/traffic.py, as the page words them."""


@dataclass(frozen=True)
class Group:
    """The runs of one configuration."""

    name: str
    runs: list[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs over which means are taken: the finished ones, or all if none is finished.

        Finished runs are not mixed with others, because a loss after half of the steps is not comparable.
        """
        return [run for run in self.runs if run.finished] or self.runs


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the groups in the order of their first runs.

    If two runs have the same settings and the same seed, no runs of these settings are grouped: they were
    made at different times or by different code, and only the user knows which of them belong together.
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
    """Return the parts that all paths share, without those that name a seed."""
    if len({len(path) for path in paths}) > 1:
        return paths[0]
    columns = zip(*paths, strict=True)
    return tuple(
        column[0] for column in columns if len(set(column)) == 1 and not _SEED_FOLDER.fullmatch(column[0])
    )


def _shortest_ends(paths: list[tuple[str, ...]]) -> list[str]:
    """Return the fewest last parts that distinguish the paths, without the last parts that all share."""
    if len(paths) > 1:
        while min(map(len, paths)) > 1 and len({path[-1] for path in paths}) == 1:
            paths = [path[:-1] for path in paths]
    depth, longest = 1, max(map(len, paths))
    while depth < longest and len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path[-depth:]) for path in paths]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return, for each key whose value is not the same in all runs, its value in each group."""
    recorded = [run for group in groups for run in group.runs if run.config]
    keys = dict.fromkeys(key for run in recorded for key in run.config)
    return {
        key: [", ".join(dict.fromkeys(_shown(run, key) for run in group.runs)) for group in groups]
        for key in keys
        if len({_shown(run, key) for run in recorded}) > 1
    }


def _shown(run: Run, key: str) -> str:
    """Return a value as YAML writes it."""
    if not run.config:
        return "not recorded"
    value = run.config.get(key, "not set")
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Column:
    """A column of the table: the name of a run's number and its format."""

    key: str
    title: str
    form: str = ""
    """The format specification; if empty, the number has three significant digits."""
    factor: float = 1.0
    unit: str = ""
    of_exact_gather: bool = False
    """Whether the column is shown only if a run gathers weights exactly."""

    def write(self, values: Sequence[float]) -> str:
        """Format one value, or the mean and the standard deviation of several."""
        if not values:
            return NOTHING
        mean = statistics.fmean(values) * self.factor
        form = self.form or _three_digits(mean)
        text = format(mean, form)
        if len(set(values)) > 1 and math.isfinite(mean):
            text += f" ± {format(statistics.stdev(values) * self.factor, form.lstrip('+'))}"
        return text + self.unit


def digits(value: float) -> str:
    """Format a number with at least three significant digits and no exponent: 0.184, 1.43, 1,427."""
    return format(value, _three_digits(value))


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return "g"
    return f",.{max(0, 2 - math.floor(math.log10(abs(value))))}f"


_COLUMNS = (
    # A narrow screen shows the first columns without scrolling the table.
    Column("valid_loss", "validation loss", ".4f"),
    Column("difference", "against the first", "+.2f", unit=" %"),
    Column("train_loss", "training loss", ".4f"),
    Column("step_seconds", "step time (s)"),
    Column("gradient_bits", "bits per gradient element", ".2f"),
    Column("gradient_bytes", "gradient MB per step", factor=1e-6),
    Column("weight_bits", "bits per weight", ".2f", of_exact_gather=True),
    Column("weight_bytes", "weight MB per step", factor=1e-6),
    Column("error_bytes", "error state MB", factor=1e-6),
    Column("weight_gather_bytes", "weight gather MB", factor=1e-6, of_exact_gather=True),
    Column("tokens_per_second", "tokens per second"),
)


def columns(runs: Sequence[Run]) -> list[Column]:
    exact = any(run.gathers_exactly for run in runs)
    return [column for column in _COLUMNS if exact or not column.of_exact_gather]


def row(
    columns: Sequence[Column], runs: Sequence[Run], counted: Sequence[Run], against: dict[int, float]
) -> list[str]:
    """Return a row's cells: the means of `counted`'s numbers, then method, bits and steps of `runs`."""
    cells = []
    for column in columns:
        numbers = [{"difference": against.get(id(run)), **run.numbers}[column.key] for run in counted]
        cells.append(column.write([number for number in numbers if number is not None]))
    run = runs[0]
    bits = NOTHING if run.bits is None or run.method in UNCOMPRESSED else str(run.bits)
    return [*cells, run.method or "not recorded", bits, _steps(runs)]


def _steps(runs: Sequence[Run]) -> str:
    """Return `200`, or `85 of 200` for an unfinished run; several runs give a range."""
    done = sorted({run.steps for run in runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"
    planned = [run.planned_steps for run in runs if run.planned_steps is not None]
    short = any(run.planned_steps is not None and run.steps < run.planned_steps for run in runs)
    return f"{text} of {max(planned)}" if short else text


def state(runs: Sequence[Run]) -> str:
    """Return the line below the row's name; it is empty for a single finished run."""
    if len(runs) == 1:
        return "" if runs[0].finished else runs[0].state.partition(" ")[0]
    unfinished = sum(not run.finished for run in runs)
    return f"{len(runs)} runs" + (f", {unfinished} of them not finished" if unfinished else "")


def validation_differences(groups: Sequence[Group]) -> dict[int, float]:
    """Return for each id(run) the difference of its validation loss to the first group's, in percent.

    A run is compared with the first group's run of the same seed, because seeds differ more than methods.
    If there is no such run, it is compared with the mean of the first group.
    """
    losses = {id(run): run.numbers["valid_loss"] for group in groups for run in group.runs}
    first = {repr(run.seed): loss for run in groups[0].runs if (loss := losses[id(run)]) is not None}
    mean = statistics.mean(first.values()) if first else 0.0
    return {
        id(run): 100 * (loss - base) / base
        for group in groups[1:]
        for run in group.runs
        if (loss := losses[id(run)]) is not None and (base := first.get(repr(run.seed), mean))
    }


def raw_gathers(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return, for each reason that occurred, in words, how often it occurred in each group."""
    reasons = dict.fromkeys(reason for group in groups for run in group.runs for reason in run.raw_gathers)
    return {
        RAW_GATHERS.get(reason, reason): [
            Column(reason, "", ",.0f").write([float(run.raw_gathers.get(reason, 0)) for run in group.counted])
            for group in groups
        ]
        for reason in sorted(reasons, key=[*RAW_GATHERS, *reasons].index)
    }
