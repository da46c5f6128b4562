"""The page's tables: runs that differ in their seeds alone are one configuration, a row and a colour.

group_runs(runs)      runs -> groups, named by the shortest part of their paths that tells them apart
row(...)              the numbers of a group or a run; means where there are several
differences(groups)   the settings in which runs differ, with what each group has
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
}
"""The reasons of megatron/seams/traffic.py, in words."""


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
        key: [", ".join(dict.fromkeys(_shown(run, key) for run in group.runs)) for group in groups]
        for key in keys
        if len({_shown(run, key) for run in recorded}) > 1
    }


def _shown(run: Run, key: str) -> str:
    """A value as YAML writes it."""
    if not run.config:
        return "not recorded"
    value = run.config.get(key, "not set")
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Column:
    """A number of a run: what it is called, how it is written."""

    key: str
    title: str
    form: str = ""
    """A format of Python's; empty: as many places as give the number three significant digits."""
    factor: float = 1.0
    unit: str = ""
    of_exact_gather: bool = False
    """There only where a run gathers weights exactly."""

    def write(self, values: Sequence[float]) -> str:
        """One value, or the mean and the standard deviation of several, with the same decimal places."""
        if not values:
            return NOTHING
        mean = statistics.fmean(values) * self.factor
        form = self.form or _three_digits(mean)
        text = format(mean, form)
        if len(set(values)) > 1 and math.isfinite(mean):
            text += f" ± {format(statistics.stdev(values) * self.factor, form.lstrip('+'))}"
        return text + self.unit


def digits(value: float) -> str:
    """At least three significant digits, no exponent: 0.184, 1.43, 1,427."""
    return format(value, _three_digits(value))


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return "g"
    return f",.{max(0, 2 - math.floor(math.log10(abs(value))))}f"


_COLUMNS = (
    # A narrow screen shows the first ones without moving the table.
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
    """The columns of a page of these runs."""
    exact = any(run.gathers_exactly for run in runs)
    return [column for column in _COLUMNS if exact or not column.of_exact_gather]


def row(
    columns: Sequence[Column], runs: Sequence[Run], counted: Sequence[Run], against: dict[int, float]
) -> list[str]:
    """The numbers of one run, or the means of those that are counted; method, bits and steps of all."""
    found = []
    for column in columns:
        numbers = [{"difference": against.get(id(run)), **run.numbers}[column.key] for run in counted]
        found.append(column.write([number for number in numbers if number is not None]))
    run = runs[0]
    bits = NOTHING if run.bits is None or run.method in UNCOMPRESSED else str(run.bits)
    return [*found, run.method or "not recorded", bits, _steps(runs)]


def _steps(runs: Sequence[Run]) -> str:
    """`200`, or `85 of 200` of a run that has not made all of its steps; a range for several."""
    done = sorted({run.steps for run in runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"
    planned = [run.planned_steps for run in runs if run.planned_steps is not None]
    short = any(run.planned_steps is not None and run.steps < run.planned_steps for run in runs)
    return f"{text} of {max(planned)}" if short else text


def state(runs: Sequence[Run]) -> str:
    """What the row says below its name; empty for one run that came to its end."""
    if len(runs) == 1:
        return "" if runs[0].finished else runs[0].state.partition(" ")[0]
    unfinished = sum(not run.finished for run in runs)
    return f"{len(runs)} runs" + (f", {unfinished} of them not finished" if unfinished else "")


def validation_differences(groups: Sequence[Group]) -> dict[int, float]:
    """id(run) -> its validation loss against the first configuration's, in percent.

    The counterpart is that configuration's run with the same seed: seeds scatter more than methods differ.
    Without one it is the mean of all its runs.
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
    """Reason in words -> how often it was in each group, of the reasons that there were."""
    reasons = dict.fromkeys(reason for group in groups for run in group.runs for reason in run.raw_gathers)
    return {
        RAW_GATHERS.get(reason, reason): [
            Column(reason, "", ",.0f").write([float(run.raw_gathers.get(reason, 0)) for run in group.counted])
            for group in groups
        ]
        for reason in sorted(reasons, key=[*RAW_GATHERS, *reasons].index)
    }


def weight_buckets(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Bucket -> its bits per weight in each group, where a run has several buckets."""
    of_runs = {id(run): run.weight_bits_by_bucket for group in groups for run in group.runs}
    if all(len(bits) < 2 for bits in of_runs.values()):
        return {}
    return {
        bucket: [
            Column(bucket, "", ".2f").write(
                [bits for run in group.counted if (bits := of_runs[id(run)].get(bucket)) is not None]
            )
            for group in groups
        ]
        for bucket in dict.fromkeys(bucket for bits in of_runs.values() for bucket in bits)
    }
