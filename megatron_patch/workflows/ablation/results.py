"""Makes the results of an ablation: the comparisons of its cells, results.csv, ablation.md and the tables.

The files depend only on the runs' results, so that an ablation that was killed and continued has the same
files. Therefore they have no times, which are in every run's summary.json.
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
from megatron_patch.workflows.ablation import records
from megatron_patch.workflows.ablation.definition import Ablation, Cell, Run
from megatron_patch.workflows.ablation.statistics import (
    CONFIDENCE,
    OVER_STEPS,
    Interval,
    interval,
    over_steps,
    percent,
)
from megatron_patch.workflows.run import run_folder
from megatron_patch.workflows.run.run_folder import State
from megatron_patch.workflows.run_reader import read_summary

Row = tuple[str, ...]
_INTERVAL = f"{100 * CONFIDENCE:g} % interval"
_COLUMNS = (
    *("cell", "runs", "valid. loss", "difference", _INTERVAL, ""),
    *("bits/gradient", "bits/weight", "error state MB"),
)
_CONTRAST_COLUMNS = ("", "runs", "difference", _INTERVAL, "")
_TREND_COLUMNS = (
    *("training loss, over the steps", "runs", "last quarter", _INTERVAL),
    *("points per doubling", _INTERVAL),
)
_TEST_COLUMNS = ("test set", "pairs", "perplexity", "difference of the loss", _INTERVAL, "")
# These columns are the last ones in results.csv, so that earlier columns keep their places.
_LATER = ("weight_bits_per_element", "world_size", "device", "versions", records.CONFIGURATION, "test_loss")
_NUMBERS = tuple(name for name in records.NUMBERS if name not in _LATER)


@dataclass(frozen=True)
class Outcome:
    """One run's state and its summary."""

    run: Run
    state: State
    summary: dict[str, Any] | None

    def finite(self, name: str) -> float | None:
        """Return a loss of the summary; None if it is missing or not finite."""
        value = None if self.summary is None else self.summary.get(name)
        return value if value is not None and math.isfinite(value) else None


def read_outcome(run: Run, known: records.Summaries) -> Outcome:
    """Return the outcome in the run's folder; if it never began, that of its configuration in `known`."""
    state = run_folder.look(run.folder, run.configured)
    if state is State.NEW and (summary := known.get(records.digest(run.configured))):
        return Outcome(run, State.DONE, summary)
    return Outcome(run, state, read_summary(run.folder) if state is State.DONE else None)


class Results:
    """The outcomes of an ablation's runs and the comparisons between its cells."""

    def __init__(
        self,
        ablation: Ablation,
        runs: Sequence[Run],
        known: records.Summaries | None = None,
        known_curves: records.Curves | None = None,
    ) -> None:
        """`known` and `known_curves` are results of runs without folders, from files of an ablation."""
        self.ablation = ablation
        self.outcomes = [read_outcome(run, known or {}) for run in runs]
        self._known_curves = known_curves or {}

    def losses(self, cell: Cell, kind: str = "valid_loss") -> dict[int, float]:
        """Return a cell's validation loss, or test loss, by seed, for the runs that are done."""
        of_cell = [outcome for outcome in self.outcomes if outcome.run.cell == cell]
        return {outcome.run.seed: loss for outcome in of_cell if (loss := outcome.finite(kind)) is not None}

    def differences(self, cell: Cell, reference: Cell | None = None) -> dict[int, float]:
        """Return a cell's differences in percent by seed, to the baseline or to `reference`."""
        return percent(self.losses(cell), self.losses(reference or self.ablation.baseline))

    @cached_property
    def logged(self) -> list[tuple[Run, Sequence[records.Point]]]:
        """The runs that are done, each with its logged steps."""
        runs = [outcome.run for outcome in self.outcomes if outcome.state is State.DONE]
        known = self._known_curves
        return [
            (run, records.points_of(run.folder) or known.get(records.digest(run.configured), ()))
            for run in runs
        ]

    def training_losses(self, cell: Cell) -> dict[int, dict[int, float]]:
        """Return a cell's finite training losses by seed and logged step."""
        return {run.seed: records.losses(points) for run, points in self.logged if run.cell == cell}

    def training_differences(self, cell: Cell) -> dict[int, dict[int, float]]:
        """Return a cell's differences in training loss to the baseline, in percent, by seed and step."""
        base, own = self.training_losses(self.ablation.baseline), self.training_losses(cell)
        by_seed = {seed: percent(own.get(seed, {}), base.get(seed, {})) for seed in self.differences(cell)}
        return {seed: by_step for seed, by_step in by_seed.items() if by_step}

    def tokens_a_step(self) -> int:
        """Return the tokens of a step; 1 if the runs' batches do not all have one known size."""
        flags = [outcome.run.configured.megatron for outcome in self.outcomes]
        (batch, length), *others = {(args.get("global_batch_size"), args.get("seq_length")) for args in flags}
        if others or any(args.get("rampup_batch_size") for args in flags):
            return 1
        return batch * length if isinstance(batch, int) and isinstance(length, int) else 1

    def groups(self) -> dict[str, list[Cell]]:
        """Return the cells, grouped by their settings other than the contrasted one, without the baseline."""
        contrast = self.ablation.contrast
        groups: dict[str, list[Cell]] = {}
        for cell in self.ablation.cells[1:] if contrast else ():
            if contrast in cell.settings:
                shared = {key: value for key, value in cell.settings.items() if key != contrast}
                groups.setdefault(Cell(shared).name, []).append(cell)
        return groups

    def csv(self) -> str:
        """Return the text of results.csv, a line per run in the definition's order."""
        keys = list(dict.fromkeys(key for cell in self.ablation.cells for key in cell.settings))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["cell", "seed", *keys, "state", *_NUMBERS, "difference_percent", *_LATER])
        differences = {cell.name: self.differences(cell) for cell in self.ablation.cells}
        for outcome in self.outcomes:
            cell, seed = outcome.run.cell, outcome.run.seed
            columns = records.columns(outcome.run.configured, outcome.summary)
            line = [cell.name, seed, *(cell.settings.get(key, "") for key in keys), outcome.state.value]
            line += [*(columns[name] for name in _NUMBERS), differences[cell.name].get(seed, "")]
            writer.writerow([*line, *(columns[name] for name in _LATER)])
        return text.getvalue()

    def rows(self) -> list[Row]:
        """Return the main table's rows, one for each cell."""
        return [self._row(cell) for cell in self.ablation.cells]

    def _row(self, cell: Cell) -> Row:
        losses = self.losses(cell)
        of_losses, difference = (
            interval(list(losses.values())),
            interval(list(self.differences(cell).values())),
        )
        mean = "-"
        if of_losses:
            mean = f"{of_losses.mean:.4f}" + (f" ± {of_losses.spread:.4f}" if of_losses.n > 1 else "")
        compared = difference and cell != self.ablation.baseline
        # Values that do not depend on the seed are taken from the first run that is done.
        summary = next((o.summary for o in self.outcomes if o.run.cell == cell and o.summary), None)
        bits: Row = ("-",) * 3
        if summary:
            wires = [summary[wire]["bits_per_element"] for wire in ("gradient_wire", "weight_wire")]
            bits = (*(f"{wire:.2f}" for wire in wires), f"{summary['compensation_bytes'] / 1e6:.2f}")
        return (
            cell.name,
            f"{len(losses)} of {len(self.ablation.seeds)}",
            mean,
            *(_columns(difference)[1:] if difference and compared else ("-",) * 3),
            *bits,
        )

    def contrast_rows(self) -> list[Row]:
        """Return a row for each pair of cells that differ only in the contrasted setting."""
        rows: list[Row] = []
        key = self.ablation.contrast or ""
        for group, members in self.groups().items():
            for first, second in itertools.combinations(members, 2):
                if difference := interval(list(self.differences(second, first).values())):
                    name = f"{second.settings[key]} against {first.settings[key]}, {group}".rstrip(", ")
                    rows.append((name, *_columns(difference)))
        return rows

    def trend_rows(self) -> list[Row]:
        """Return a row for each cell of long runs: how its difference in training loss develops."""
        rows: list[Row] = []
        for cell in self.ablation.cells[1:]:
            if trend := over_steps(self.training_differences(cell)):
                rows.append((cell.name, *_columns(trend.last)[:3], *_columns(trend.doubling, "")[1:3]))
        return rows

    def test_rows(self) -> list[Row]:
        """Return a row for each cell on its loss on the test set, if there is one (data.test_path)."""
        rows: list[Row] = []
        baseline = self.ablation.baseline
        for cell in self.ablation.cells:
            if losses := self.losses(cell, "test_loss"):
                perplexity = statistics.fmean(math.exp(loss) for loss in losses.values())
                difference = interval(list(percent(losses, self.losses(baseline, "test_loss")).values()))
                columns = _columns(difference) if difference and cell != baseline else ("-",) * 4
                rows.append((cell.name, columns[0], f"{perplexity:.3f}", *columns[1:]))
        return rows

    def _sections(self) -> list[tuple[str, Row, list[Row]]]:
        """Return title, columns and rows of those tables after the first one that have rows."""
        alone = f"Cells that differ in `{self.ablation.contrast}` alone"
        sections = [
            (alone, _CONTRAST_COLUMNS, self.contrast_rows()),
            (OVER_STEPS, _TREND_COLUMNS, self.trend_rows()),
            ("On the test set, after the last step", _TEST_COLUMNS, self.test_rows()),
        ]
        return [section for section in sections if section[2]]

    def tables(self) -> list[Table]:
        return [
            tables.terminal(
                (first or f"{self.ablation.contrast}", *others), rows, left=(first, ""), overflow="fold"
            )
            for _, (first, *others), rows in [("", _COLUMNS, self.rows()), *self._sections()]
        ]

    def markdown(self) -> str:
        """Return the text of ablation.md."""
        ablation = self.ablation
        changed = f"with `{' '.join(ablation.overrides)}`" if ablation.overrides else "as it is"
        parts = [
            f"# {ablation.name}\n",
            f"Base recipe `{ablation.base.name}`, {changed}; "
            f"seeds {', '.join(map(str, ablation.seeds))}. Difference: validation loss against "
            f"`{ablation.baseline.name}` of the same seed, in percent, mean and {_INTERVAL} over the seeds "
            "(Student's t, each comparison by itself).\n",
            tables.markdown(_COLUMNS, self.rows()),
        ]
        for title, columns, rows in self._sections():
            parts += [f"\n{title}:\n", tables.markdown(columns, rows)]
        return "\n".join([*parts, self._footnote()])

    def _footnote(self) -> str:
        summaries = [outcome.summary for outcome in self.outcomes if outcome.summary]
        versions = {json.dumps(s["versions"]) for s in summaries}
        kinds = sorted({f"{s['world_size']} ranks, {s['steps']} steps, {s['device']}" for s in summaries})
        lines = [f"\n{'; '.join(kinds)}." if kinds else "\nNo run is done."]
        for text in sorted(versions):
            lines.append(", ".join(f"{name} {version}" for name, version in json.loads(text).items()) + ".")
        if len(versions) > 1:
            lines.append("Not all runs were made with the same versions.")
        left = [
            f"- {outcome.run.label}: {outcome.state.value}"
            for outcome in self.outcomes
            if outcome.state is not State.DONE
        ]
        if left:
            lines += ["", "Without a result:", "", *left]
        return "\n".join(lines) + "\n"


def _columns(difference: Interval, unit: str = " %") -> tuple[str, str, str, str]:
    bounds = "-" if difference.low is None else f"{difference.low:+.2f} to {difference.high:+.2f}"
    return str(difference.n), f"{difference.mean:+.2f}{unit}", bounds, difference.verdict
