"""The report's page: what groups.py, table.py and figures.py say, put into page.html.

The page is one file without scripts that asks for nothing: its Content-Security-Policy forbids what it does
not hold itself. jinja2 escapes every text that comes from a run; only the pictures, which figures.py makes,
go in as they are.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from megatron_patch import __version__
from megatron_patch.workflows.report import figures, planned, quantities, table
from megatron_patch.workflows.report.groups import SEEDS, Group, differences, group_runs, run_names
from megatron_patch.workflows.report.runs import Run

_MOST_LETTERS = 50
"""Of all names together, for them to stand in the heading."""
_MOST_NAMES = 12
"""Runs that are named at the end of the page; of more it says how many they are."""
_MOST_COLUMNS = 6
"""Configurations that stand side by side in the table of differences; more stand one below the other."""

_MOST_OPEN = 12
"""Buckets; more of them are folded away."""

Named = tuple[str, Run]
Row = tuple[str, str, list[str]]
"""Name, what is to be said below it, cells."""


def _foldable(text: str) -> Markup:
    """Where a long name or key may be broken into lines."""
    return Markup("<wbr>").join(re.split(r"(?<=[/,_.])", text))


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("megatron_patch.workflows.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["foldable"] = _foldable
    return environment.get_template("page.html")


def render(runs: Sequence[Run], plan: dict[str, Any] | None = None) -> str:
    """The whole page; `plan` is one of planned.py."""
    groups = group_runs(runs)
    exact = [group for group in groups if any(run.gathers_exactly for run in group.runs)]
    chosen = [quantity for quantity in quantities.QUANTITIES if exact or not quantity.of_exact_gather]
    columns = table.columns(runs)
    drawn = groups[: figures.MOST_GROUPS]
    named = list(zip(run_names(runs), runs, strict=True))
    predicted = planned.section(plan) if plan else None
    shown = [figures.draw(quantity, drawn) for quantity in chosen]
    return _template().render(
        heading=_heading(runs, groups),
        names=[group.name for group in groups],
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        colours=range(figures.COLOURS),
        styles=[_style(index) for index in range(max(len(drawn), len(plan["methods"]) if plan else 0))],
        notes=_notes(runs, groups),
        columns=columns,
        rows=_rows(columns, groups),
        each_run=_each_run(columns, named, groups),
        figures=[(figure, Markup(figure.svg)) for figure in shown if figure],
        means=any(len(group.runs) > 1 for group in drawn),
        thin_lines=len(drawn) <= figures.MOST_EACH,
        missing=[
            quantity.title
            for quantity, figure in zip(chosen, shown, strict=True)
            if figure is None and (quantity.key != "difference" or len(groups) > 1)
        ],
        exact=[group.name for group in exact],
        raw_gathers=table.raw_gathers(exact),
        weight_buckets=table.weight_buckets(exact),
        most_open=_MOST_OPEN,
        differences=differences(groups),
        sideways=len(groups) <= _MOST_COLUMNS,
        first_config=runs[0].config_text,
        planned=predicted,
        planned_svg=Markup(predicted.svg) if predicted else "",
        unfinished=[(name, run.state) for name, run in named if not run.finished],
        environments=_environments(named),
    )


def _heading(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    names = ", ".join(group.name for group in groups)
    if len(runs) == 1:
        return f"Run {names}"
    names = f": {names}" if len(names) <= _MOST_LETTERS else ""
    if len(groups) < len(runs):
        plural = "s" if len(groups) > 1 else ""
        return f"{len(runs)} runs of {len(groups)} configuration{plural}{names}"
    return f"{len(runs)} runs{names}"


def _style(index: int) -> tuple[int, str]:
    return index % figures.COLOURS, figures.DASHES[index % len(figures.DASHES)]


def _rows(columns: Sequence[table.Column], groups: Sequence[Group]) -> list[Row]:
    found = table.validation_differences(groups)
    return [_row(columns, group.name, group.runs, group.counted, found) for group in groups]


def _each_run(columns: Sequence[table.Column], named: Sequence[Named], groups: Sequence[Group]) -> list[Row]:
    """A row for every run, where the first table has means."""
    if len(groups) == len(named):
        return []
    found = table.validation_differences(groups)
    return [_row(columns, name, [run], [run], found) for name, run in named]


def _row(
    columns: Sequence[table.Column],
    name: str,
    runs: Sequence[Run],
    counted: Sequence[Run],
    found: dict[int, float],
) -> Row:
    numbers = table.cells(columns, counted, found)
    return name, table.state(runs), [*numbers, *table.method_and_bits(runs), table.steps(runs)]


def _notes(runs: Sequence[Run], groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing."""
    notes = []
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        verb = "has" if unfinished == 1 else "have"
        subject = f"{unfinished} of {len(runs)} runs {verb}" if len(runs) > 1 else "The run has"
        notes.append(f"{subject} not come to an end; the curves go as far as the logs.")
    over = [run.summary for run in runs if run.summary]
    found: dict[str, set[Any]] = {
        "devices": {summary.get("device") for summary in over},
        "numbers of ranks": {run.world_size for run in runs},
        "versions": {repr(summary.get("versions")) for summary in over},
    }
    different = [what for what, values in found.items() if len(values) > 1]
    if different:
        notes.append(
            f"The runs have different {' and '.join(different)} (see the end of the page): their step times "
            "and tokens per second cannot be compared."
        )
    trained = ("megatron.", "data.")
    others = [key for key in differences(groups) if key.startswith(trained) and key not in SEEDS]
    if others:
        more = ", ..." if len(others) > 3 else ""
        notes.append(
            f"The runs differ in more than compression ({', '.join(others[:3])}{more}): differences of their "
            "losses have other causes too."
        )
    if len(groups) > figures.MOST_GROUPS:
        notes.append(
            f"The curves are those of the first {figures.MOST_GROUPS} of {len(groups)} configurations, since "
            "more lines could not be told apart; the tables have all. Name fewer runs to see other curves."
        )
    return notes


def _environments(named: Sequence[Named]) -> list[tuple[str, str]]:
    """What runs were made with, each once, and which runs."""
    found: dict[str, list[str]] = {}
    for name, run in named:
        versions = ", ".join(f"{key} {value}" for key, value in run.summary.get("versions", {}).items())
        device = run.summary.get("device") or run.config.get("launch.device") or "device not recorded"
        ranks = "ranks not recorded" if run.world_size is None else f"{run.world_size} ranks"
        found.setdefault(f"{ranks}, {device}; {versions or 'versions not recorded'}", []).append(name)
    return [
        (made_with, ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} runs")
        for made_with, names in found.items()
    ]
