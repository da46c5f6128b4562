"""The numbers of the summary table: a row for each group of runs, means where it has several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patch.workflows.report.groups import Group
from megatron_patch.workflows.report.runs import UNCOMPRESSED, Run

NOTHING = "–"


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


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return "g"
    return f",.{max(0, 2 - math.floor(math.log10(abs(value))))}f"


def digits(value: float) -> str:
    """At least three significant digits, no exponent: 0.184, 1.43, 1,427."""
    return format(value, _three_digits(value))


COLUMNS = (
    # First what a narrow screen shows without moving the table.
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


RAW_GATHERS = {
    "forced": "forced, by an evaluation or a checkpoint",
    "inside_step": "dispatched inside the optimizer's step",
    "not_coded": "with no step before it",
    "copies_differ": "ranks' copies differed",
    "no_shorter": "the code saved nothing",
    "edited": "weights changed between step and gather",
}
"""The reasons of megatron/seams/weight_report.py, in words."""


def columns(runs: Sequence[Run]) -> list[Column]:
    """The columns of a page of these runs."""
    exact = any(run.gathers_exactly for run in runs)
    return [column for column in COLUMNS if exact or not column.of_exact_gather]


def raw_gathers(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Reason in words -> how often it was in each group, of the reasons that there were."""
    reasons = dict.fromkeys(reason for group in groups for run in group.runs for reason in run.raw_gathers)
    found = {}
    for reason in sorted(reasons, key=[*RAW_GATHERS, *reasons].index):
        column = Column(reason, RAW_GATHERS.get(reason, reason), ",.0f")
        found[column.title] = [
            column.write([float(run.raw_gathers.get(reason, 0)) for run in group.counted]) for group in groups
        ]
    return found


def weight_buckets(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Bucket -> its bits per weight in each group, where a run has several buckets."""
    of_runs = {id(run): run.weight_bits_by_bucket for group in groups for run in group.runs}
    if all(len(bits) < 2 for bits in of_runs.values()):
        return {}
    return {
        bucket: [
            Column(bucket, bucket, ".2f").write(
                [bits for run in group.counted if (bits := of_runs[id(run)].get(bucket)) is not None]
            )
            for group in groups
        ]
        for bucket in dict.fromkeys(bucket for bits in of_runs.values() for bucket in bits)
    }


def validation_differences(groups: Sequence[Group]) -> dict[int, float]:
    """id(run) -> its validation loss against the first configuration's, in percent.

    The counterpart is that configuration's run with the same seed: seeds scatter more than methods differ.
    Without one it is the mean of all its runs.
    """
    first = {
        repr(run.seed): loss for run in groups[0].runs if (loss := run.numbers["valid_loss"]) is not None
    }
    if not first:
        return {}
    mean = statistics.mean(first.values())
    return {
        id(run): 100 * (loss - base) / base
        for group in groups[1:]
        for run in group.runs
        if (loss := run.numbers["valid_loss"]) is not None and (base := first.get(repr(run.seed), mean))
    }


def cells(columns: Sequence[Column], runs: Sequence[Run], differences: dict[int, float]) -> list[str]:
    """The numbers of a row: of one run, or the mean and the standard deviation of several."""
    row = []
    for column in columns:
        if column.key == "difference":
            values = [differences[id(run)] for run in runs if id(run) in differences]
        else:
            values = [value for run in runs if (value := run.numbers[column.key]) is not None]
        row.append(column.write(values))
    return row


def method_and_bits(runs: Sequence[Run]) -> tuple[str, str]:
    """Of the first run: the others have the same settings."""
    run = runs[0]
    method = run.method or "not recorded"
    return method, NOTHING if run.bits is None or run.method in UNCOMPRESSED else str(run.bits)


def steps(runs: Sequence[Run]) -> str:
    """`200`, or `85 of 200` of a run that has not made all of its steps; a range for several."""
    done = sorted({run.steps for run in runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"
    planned = {run.planned_steps for run in runs} - {None}
    short = any(run.planned_steps is not None and run.steps < run.planned_steps for run in runs)
    return f"{text} of {max(p for p in planned if p is not None)}" if short and planned else text


def state(runs: Sequence[Run]) -> str:
    """What the row says below its name; empty for one run that came to its end."""
    if len(runs) == 1:
        return "" if runs[0].finished else runs[0].state.partition(" ")[0]
    unfinished = sum(not run.finished for run in runs)
    note = f", {unfinished} of them not finished" if unfinished else ""
    return f"{len(runs)} runs{note}"
