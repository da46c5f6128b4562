"""Prints the loss tables of README and docs/benchmarks.md, from the results files of ablations.

    python -m benchmarks.error_feedback.loss_table

A row shows what a setting costs, in percent of the loss of uncompressed training with the same seed: the mean
and the 95 % interval over the pairs, with **0** if it contains zero. A test compares the pages with it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.workflows.ablation.statistics import interval, percent

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    *("question", "model, optimizer", "steps, peak learning rate, pairs", "setting"),
    *("validation loss", "other text"),
)


@dataclass(frozen=True)
class Row:
    """A question and the cell that answers it; `readme` says whether README has the row, too."""

    question: str
    model: str
    steps: str
    file: str
    """The name of the results file below docs/ablations, without its ending."""
    cell: str
    setting: str
    readme: bool = False

    def text(self) -> str:
        """Return the row in Markdown."""
        valid, pairs = self._difference("valid_loss")
        other, _ = self._difference("test_loss")
        what = f"{self.model} | {self.steps}, {pairs}"
        return f"| {self.question} | {what} | {self.setting} | {valid} | {other or '-'} |"

    def _difference(self, kind: str) -> tuple[str, int]:
        with (ROOT / f"docs/ablations/{self.file}.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["state"] == "done" and row.get(kind)]
        if not rows:
            return "", 0
        losses = [
            {int(row["seed"]): float(row[kind]) for row in rows if row["cell"] == cell}
            for cell in (self.cell, rows[0]["cell"])
        ]
        found = interval(list(percent(*losses).values()))
        assert found is not None, f"{self.file} has no pair of {self.cell}"
        if found.low is None:
            return f"{found.mean:+.2f} (one pair)", 1
        if found.n == 2:  # Student's t of one degree of freedom says next to nothing.
            return f"{', '.join(f'{one:+.2f}' for one in percent(*losses).values())} (two pairs)", 2
        zero = " **0**" if found.verdict == "contains zero" else ""
        return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f}){zero}", found.n


_LONG = ("LLaMA, 3.4 M parameters, Adam", "3,000, 1e-3", "long_llama_3m")
ROWS = (
    Row("What do the defaults cost?", *_LONG, "method=loco,bits=4,start_step=150", "4 bits, LoCo", True),
    Row("And 2 bits?", *_LONG, "method=loco,bits=2,start_step=150", "2 bits, LoCo", True),
    Row(
        "What is error feedback worth?",
        *_LONG,
        "method=naive,bits=4,start_step=150",
        "4 bits without it",
        True,
    ),
    Row(
        "At 2 bits?",
        *("LLaMA, 3.4 M, Adam", "3,000, 1e-3", "long_choices_llama_3m"),
        "method=naive,bits=2,start_step=150",
        "2 bits without it",
    ),
    Row(
        "And LoCo's average of errors?",
        *("LLaMA, 3.4 M, Adam", "3,000, 1e-3", "long_choices_llama_3m"),
        "method=error_feedback,bits=2,start_step=150",
        "2 bits, the last error alone",
    ),
    Row(
        "Are resets of the error worth anything?",
        *("LLaMA, 3.4 M, Adam", "3,000, 1e-3", "long_choices_llama_3m"),
        "method=loco,bits=4,start_step=150,reset_interval=0",
        "4 bits, LoCo without resets",
    ),
    Row(
        "And in fine-tuning?",
        *("LLaMA, 3.4 M parameters, Adam", "1,000, 1e-4", "fine_tuning_llama_3m"),
        *("method=loco,bits=4", "4 bits, LoCo", True),
    ),
    Row(
        "What does 1-bit Adam cost?",
        *("LLaMA, 3.4 M, Adam", "3,000, 1e-3", "long_onebit_llama_3m"),
        *("method=onebit_adam,bits=1", "1-bit Adam"),
    ),
    Row(
        "Does the model's size matter?",
        *("LLaMA, 10.4 M, Adam", "1,000, 2e-3", "long_10m_llama_10m"),
        "method=loco,bits=4",
        "4 bits, LoCo",
    ),
    Row(
        "What do the defaults cost Muon?",
        *("LLaMA, 3.4 M parameters, Muon", "3,000, 1.8e-3", "long_muon_llama_3m"),
        *("method=error_feedback,bits=4", "4 bits, error feedback", True),
    ),
)


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, without a newline at its end."""
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join([*head, *(row.text() for row in rows)])


def main() -> None:
    """Print both tables."""
    print(table(ROWS), "\nREADME.md:\n", table([row for row in ROWS if row.readme]), sep="\n")


if __name__ == "__main__":
    main()
