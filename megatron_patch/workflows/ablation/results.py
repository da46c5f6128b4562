"""What came of an ablation: results.csv (a line per run), ablation.md (a line per cell), and the tables.

The files depend on the runs' results alone, not on when they were made: an ablation that was killed and begun
again leaves the same ones. Times are therefore not in them; every run's summary.json has its own.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from megatron_patch.workflows import tables
from megatron_patch.workflows.ablation import curves, records, trend
from megatron_patch.workflows.ablation.definition import Ablation, Cell, Run
from megatron_patch.workflows.ablation.statistics import CONFIDENCE, Interval, interval, percent
from megatron_patch.workflows.run import run_folder
from megatron_patch.workflows.run.run_folder import State

_INTERVAL = f"{100 * CONFIDENCE:g} % interval"
COLUMNS = (
    "cell",
    "runs",
    "valid. loss",
    "difference",
    _INTERVAL,
    "",
    "bits/gradient",
    "bits/weight",
    "error state MB",
)
CONTRAST_COLUMNS = ("", "runs", "difference", _INTERVAL, "")
TREND_COLUMNS = (
    "training loss, over the steps",
    "runs",
    "last quarter",
    _INTERVAL,
    "points per doubling",
    _INTERVAL,
)
TEST_COLUMNS = ("test set", "pairs", "perplexity", "difference of the loss", _INTERVAL, "")


@dataclass(frozen=True)
class Outcome:
    """One run's state, and what it left."""

    run: Run
    state: State
    summary: dict[str, Any] | None

    def finite(self, name: str) -> float | None:
        """A loss of the summary, None where there is none to compare."""
        value = None if self.summary is None else self.summary.get(name)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Contrast:
    """Two cells that differ in the contrasted setting alone: the second against the first."""

    group: str
    first: Cell
    second: Cell
    difference: Interval


class Results:
    """The outcomes of an ablation's runs and the comparisons between its cells."""

    def __init__(
        self,
        ablation: Ablation,
        runs: Sequence[Run],
        known: records.Records | None = None,
        known_curves: curves.Curves | None = None,
    ) -> None:
        """`known` and `known_curves` are runs of which a results.csv and its curves are all that is there."""
        self.ablation = ablation
        self.outcomes = [outcome(run, known or {}) for run in runs]
        self._known_curves = known_curves or {}
        self._losses: dict[tuple[str, str], dict[int, float]] = {}
        for one, kind in itertools.product(self.outcomes, ("valid_loss", "test_loss")):
            if (loss := one.finite(kind)) is not None:
                self._losses.setdefault((one.run.cell.name, kind), {})[one.run.seed] = loss

    def losses(self, cell: Cell, kind: str = "valid_loss") -> dict[int, float]:
        """Validation loss, or test loss, by seed, of the runs that are done."""
        return self._losses.get((cell.name, kind), {})

    def differences(self, cell: Cell, reference: Cell | None = None) -> dict[int, float]:
        """Percent by seed, against the baseline or another cell."""
        return percent(self.losses(cell), self.losses(reference or self.ablation.baseline))

    def logged(self) -> list[tuple[Run, Sequence[curves.Point]]]:
        """The runs that are done, with their logged steps."""
        return [
            (
                one.run,
                curves.of_folder(one.run.folder)
                or self._known_curves.get(records.digest(one.run.configured), []),
            )
            for one in self.outcomes
            if one.state is State.DONE
        ]

    @cached_property
    def points(self) -> dict[tuple[str, int], Sequence[curves.Point]]:
        """The same by a cell's name and a seed."""
        return {(run.cell.name, run.seed): points for run, points in self.logged()}

    def training_differences(self, cell: Cell) -> dict[int, dict[int, float]]:
        """Of each seed that both have, by logged step, training loss against the baseline's in percent."""
        found = {}
        for seed in self.differences(cell):
            base, own = (
                curves.losses(self.points.get((name, seed), ()))
                for name in (self.ablation.baseline.name, cell.name)
            )
            found[seed] = percent(own, base)
        return {seed: each for seed, each in found.items() if each}

    def trend_rows(self) -> list[tuple[str, ...]]:
        """A line per cell of long runs: what becomes of the difference in training loss."""
        rows: list[tuple[str, ...]] = []
        for cell in self.ablation.cells[1:]:
            if found := trend.over_steps(self.training_differences(cell)):
                last, change = _interval_columns(found.last), _interval_columns(found.doubling, "")
                rows.append((cell.name, *last[:3], *change[1:3]))
        return rows

    def test_rows(self) -> list[tuple[str, ...]]:
        """A line per cell on the test set, of ablations whose runs have one (data.test_path)."""
        rows: list[tuple[str, ...]] = []
        baseline = self.losses(self.ablation.baseline, "test_loss")
        for cell in self.ablation.cells:
            if losses := self.losses(cell, "test_loss"):
                perplexity = statistics.fmean(math.exp(loss) for loss in losses.values())
                found = interval(list(percent(losses, baseline).values()))
                known = found and cell != self.ablation.baseline
                columns = _interval_columns(found) if found and known else ("-",) * 4
                rows.append((cell.name, *columns[:1], f"{perplexity:.3f}", *columns[1:]))
        return rows

    def summary(self, cell: Cell) -> dict[str, Any] | None:
        """summary.json of the first run of a cell that is done, for what does not depend on the seed."""
        found = (one.summary for one in self.outcomes if one.run.cell == cell and one.summary)
        return next(found, None)

    def contrasts(self) -> list[Contrast]:
        """All pairs of cells that differ in the contrasted setting alone, in the order of the cells."""
        found = []
        for group, members in self.groups().items():
            for first, second in itertools.combinations(members, 2):
                difference = interval(list(self.differences(second, first).values()))
                if difference:
                    found.append(Contrast(group, first, second, difference))
        return found

    def groups(self) -> dict[str, list[Cell]]:
        """Cells that differ in the contrasted setting alone, under what they share; not the baseline."""
        contrast = self.ablation.contrast
        found: dict[str, list[Cell]] = {}
        for cell in self.ablation.cells[1:] if contrast else ():
            if contrast in cell.settings:
                shared = {key: value for key, value in cell.settings.items() if key != contrast}
                found.setdefault(Cell(shared).name, []).append(cell)
        return found

    # -- the files ------------------------------------------------------------------------------------

    def csv(self) -> str:
        """results.csv: a line per run, in the definition's order."""
        keys = list(dict.fromkeys(key for cell in self.ablation.cells for key in cell.settings))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        # What came later stands behind, so that columns keep their places.
        writer.writerow(["cell", "seed", *keys, "state", *_NUMBERS, "difference_percent", *_LATER])
        for one in self.outcomes:
            difference = self.differences(one.run.cell).get(one.run.seed)
            found = records.columns(one.run.configured, one.summary)
            writer.writerow(
                [
                    one.run.cell.name,
                    one.run.seed,
                    *(one.run.cell.settings.get(key, "") for key in keys),
                    one.state.value,
                    *(found[name] for name in _NUMBERS),
                    "" if difference is None else repr(difference),
                    *(found[name] for name in _LATER),
                ]
            )
        return text.getvalue()

    def rows(self) -> list[tuple[str, ...]]:
        """A line per cell."""
        return [self._row(cell) for cell in self.ablation.cells]

    def contrast_rows(self) -> list[tuple[str, ...]]:
        """A line per contrast."""
        key = self.ablation.contrast
        return [
            (
                f"{one.second.settings[key]} against {one.first.settings[key]}, {one.group}".rstrip(", "),
                *_interval_columns(one.difference),
            )
            for one in self.contrasts()
            if key
        ]

    def _sections(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Title, columns and rows of the tables behind the first one, where they have rows."""
        alone = f"Cells that differ in `{self.ablation.contrast}` alone"
        found = (
            (alone, CONTRAST_COLUMNS, self.contrast_rows()),
            (trend.WHAT, TREND_COLUMNS, self.trend_rows()),
            ("On the test set, after the last step", TEST_COLUMNS, self.test_rows()),
        )
        return [section for section in found if section[2]]

    def markdown(self) -> str:
        """ablation.md."""
        ablation = self.ablation
        parts = [
            f"# {ablation.name}\n",
            f"Base recipe `{ablation.base.name}`, {_code(ablation.overrides)}; "
            f"seeds {', '.join(map(str, ablation.seeds))}. Difference: validation loss against "
            f"`{ablation.baseline.name}` of the same seed, in percent, mean and {_INTERVAL} over the seeds "
            "(Student's t, each comparison by itself).\n",
            tables.markdown(COLUMNS, self.rows()),
        ]
        for title, columns, rows in self._sections():
            parts += [f"\n{title}:\n", tables.markdown(columns, rows)]
        return "\n".join([*parts, self._footnote()])

    def tables(self) -> list[Table]:
        """The same for the terminal."""
        found = [(COLUMNS, self.rows()), *((columns, rows) for _, columns, rows in self._sections())]
        return [
            tables.terminal(
                (first or f"{self.ablation.contrast}", *others), rows, left=(first, ""), overflow="fold"
            )
            for (first, *others), rows in found
        ]

    def _row(self, cell: Cell) -> tuple[str, ...]:
        losses = interval(list(self.losses(cell).values()))
        summary = self.summary(cell)
        columns = ("-",) * 3
        if cell != self.ablation.baseline:
            difference = interval(list(self.differences(cell).values()))
            columns = _interval_columns(difference)[1:] if difference else ("-",) * 3
        return (
            cell.name,
            f"{len(self.losses(cell))} of {len(self.ablation.seeds)}",
            _mean(losses),
            *columns,
            f"{summary['gradient_wire']['bits_per_element']:.2f}" if summary else "-",
            f"{summary['weight_wire']['bits_per_element']:.2f}" if summary else "-",
            f"{summary['compensation_bytes'] / 1e6:.2f}" if summary else "-",
        )

    def _footnote(self) -> str:
        summaries = [one.summary for one in self.outcomes if one.summary]
        versions = {json.dumps(one["versions"]) for one in summaries}
        kinds = sorted(
            {f"{one['world_size']} ranks, {one['steps']} steps, {one['device']}" for one in summaries}
        )
        lines = [f"\n{'; '.join(kinds)}." if kinds else "\nNo run is done."]
        for text in sorted(versions):
            lines.append(", ".join(f"{name} {version}" for name, version in json.loads(text).items()) + ".")
        if len(versions) > 1:
            lines.append("Not all runs were made with the same versions.")
        left = [one for one in self.outcomes if one.state is not State.DONE]
        if left:
            lines += ["", "Without a result:", ""]
            lines += [f"- {one.run.label}: {one.state.value}" for one in left]
        return "\n".join(lines) + "\n"


_LATER = ("weight_bits_per_element", "world_size", "device", "versions", records.CONFIGURATION, "test_loss")
_NUMBERS = tuple(name for name in records.NUMBERS if name not in _LATER)


def outcome(run: Run, known: records.Records) -> Outcome:
    """By the run's folder; where it was never begun, by what a results.csv says of its configuration."""
    found = run_folder.look(run.folder, run.configured)
    if found is State.NEW and (summary := known.get(records.digest(run.configured))):
        return Outcome(run, State.DONE, summary)
    return Outcome(run, found, run_folder.summary(run.folder) if found is State.DONE else None)


def _code(overrides: Sequence[str]) -> str:
    return f"with `{' '.join(overrides)}`" if overrides else "as it is"


def _mean(losses: Interval | None) -> str:
    if losses is None:
        return "-"
    return f"{losses.mean:.4f}" + (f" ± {losses.spread:.4f}" if losses.n > 1 else "")


def _interval_columns(found: Interval, unit: str = " %") -> tuple[str, str, str, str]:
    bounds = "-" if found.low is None else f"{found.low:+.2f} to {found.high:+.2f}"
    return str(found.n), f"{found.mean:+.2f}{unit}", bounds, found.verdict
