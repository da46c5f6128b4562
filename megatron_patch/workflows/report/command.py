"""`megatron-loco report`: runs' curves, numbers and differences on one HTML page.

RUN is a run's folder or a folder that holds runs: `megatron-loco report runs/quickstart` shows the runs of a
`compare`. All runs are compared with the first one, which in a folder is one without compression. Runs that
differ only in their seeds share a row and a colour. A run need not have ended. The page is one file and loads
nothing.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megatron_patch import __version__
from megatron_patch.errors import UserError
from megatron_patch.files import write_whole
from megatron_patch.workflows import plots
from megatron_patch.workflows.report import figures, table
from megatron_patch.workflows.report.table import SEEDS, Group, group_runs, run_names
from megatron_patch.workflows.run_reader import Run, read_runs

_MOST_LETTERS = 50
"""The heading lists the names if they have no more letters than this in all."""
_MOST_NAMES = 12
"""If more runs than this share an environment, the end of the page gives their number, not their names."""
_MOST_COLUMNS = 6
"""If there are more configurations than this, the table of differences lists them one below the other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, or of runs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/report.html"),
        metavar="FILE",
        help="the page; one that is there is replaced (default: runs/report.html)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    out: Path = args.out
    if out.suffix not in (".html", ".htm") or out.is_dir():  # No run's file may be overwritten.
        raise UserError(f"--out: {out} must be a file that ends in .html")
    runs = read_runs(args.runs)
    page = render(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror}") from error
    print(f"{len(runs)} run{'s'[: len(runs) > 1]}: {out} ({len(page.encode()) / 1e3:,.0f} kB)")
    return 0


def render(runs: Sequence[Run]) -> str:
    """Return the page as HTML.

    The page is one file without scripts, and its Content-Security-Policy forbids to load anything. jinja2
    escapes every text that comes from a run; only the pictures are inserted unescaped.
    """
    environment = Environment(
        loader=PackageLoader("megatron_patch.workflows.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A long name or key may be broken into lines after these characters.
    environment.filters["foldable"] = lambda text: Markup("<wbr>").join(re.split(r"(?<=[/,_.])", text))
    groups = group_runs(runs)
    exact = [group for group in groups if any(run.gathers_exactly for run in group.runs)]
    drawn = groups[: figures.MOST_GROUPS]
    chosen = [quantity for quantity in figures.QUANTITIES if exact or not quantity.of_exact_gather]
    shown = [figures.draw(quantity, drawn) for quantity in chosen]
    columns, against = table.columns(runs), table.validation_differences(groups)
    named = list(zip(run_names(runs), runs, strict=True))
    differences = table.differences(groups)
    return environment.get_template("page.html").render(
        heading=_heading(runs, groups),
        names=[group.name for group in groups],
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        styles=[
            (index % plots.COLOURS, plots.DASHES[index % len(plots.DASHES)]) for index in range(len(drawn))
        ],
        notes=_notes(runs, groups, differences),
        columns=columns,
        rows=[(g.name, table.state(g.runs), table.row(columns, g.runs, g.counted, against)) for g in groups],
        # If the first table has means, a second one has a row for every run.
        each_run=[
            (name, table.state([run]), table.row(columns, [run], [run], against)) for name, run in named
        ]
        if len(groups) < len(runs)
        else [],
        figures=[(figure, Markup(figure.svg)) for figure in shown if figure],
        means=any(len(group.runs) > 1 for group in drawn),
        thin_lines=len(drawn) <= figures.MOST_EACH,
        missing=[
            quantity.title
            for quantity, figure in zip(chosen, shown, strict=True)
            if figure is None and (quantity.key != "difference" or len(groups) > 1)
        ],
        trials=[
            (name, run.trial, Markup(figures.draw_trial(number, run.trial[1:])))
            for number, (name, run) in enumerate(named)
            if len(run.trial) > 1
        ],
        exact=[group.name for group in exact],
        raw_gathers=table.raw_gathers(exact),
        differences=differences,
        sideways=len(groups) <= _MOST_COLUMNS,
        first_config=runs[0].config_text,
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


def _notes(runs: Sequence[Run], groups: Sequence[Group], differences: dict[str, list[str]]) -> list[str]:
    """Return the warnings that a reader must know before comparing the runs."""
    notes = []
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        verb = "has" if unfinished == 1 else "have"
        subject = f"{unfinished} of {len(runs)} runs {verb}" if len(runs) > 1 else "The run has"
        notes.append(f"{subject} not come to an end; the curves go as far as the logs.")
    over = [run.summary for run in runs if run.summary]
    circumstances: dict[str, set[Any]] = {
        "devices": {summary.get("device") for summary in over},
        "numbers of ranks": {run.world_size for run in runs},
        "versions": {repr(summary.get("versions")) for summary in over},
    }
    different = [what for what, values in circumstances.items() if len(values) > 1]
    if different:
        notes.append(
            f"The runs have different {' and '.join(different)} (see the end of the page): their step times "
            "and tokens per second cannot be compared."
        )
    others = [key for key in differences if key.startswith(("megatron.", "data.")) and key not in SEEDS]
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


def _environments(named: Sequence[tuple[str, Run]]) -> list[tuple[str, str]]:
    """Return each environment (ranks, device, versions) in which runs were made, with the runs' names."""
    environments: dict[str, list[str]] = {}
    for name, run in named:
        versions = ", ".join(f"{key} {value}" for key, value in (run.summary.get("versions") or {}).items())
        device = run.summary.get("device") or run.config.get("launch.device") or "device not recorded"
        ranks = "ranks not recorded" if run.world_size is None else f"{run.world_size} ranks"
        environments.setdefault(f"{ranks}, {device}; {versions or 'versions not recorded'}", []).append(name)
    return [
        (made_with, ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} runs")
        for made_with, names in environments.items()
    ]
