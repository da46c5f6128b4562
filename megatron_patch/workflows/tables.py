"""Makes tables of texts for the terminal and for Markdown files."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich.table import Table


def terminal(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Container[str], **of_columns: Any
) -> Table:
    """Return a table whose columns are aligned right, except those in `left`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", **of_columns)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a newline at its end."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
