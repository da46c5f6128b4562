"""Writes the table of options in docs/options.md from the fields of CompressionConfig and their help texts.

The table stands between two comments of that page; everything else there is written by hand.

Usage: python tools/options.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_patch.config import CompressionConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/options.md"
BEGIN = "<!-- This table is generated: python tools/options.py -->"
END = "<!-- The generated table ends here. -->"


def table() -> str:
    """A row for each option: name, type or allowed values, default, and what it does."""
    defaults = CompressionConfig()
    rows = ["| option | values | default | what it does |", "| --- | --- | --- | --- |"]
    for option in dataclasses.fields(CompressionConfig):
        help = str(option.metadata["help"]).replace("|", "\\|").replace("<=", "≤").replace("<", "&lt;")
        default = _code(getattr(defaults, option.name))
        rows.append(f"| `{option.name}` | {_values(option)} | {default} | {help} |")
    return "\n".join(rows)


def _values(option: dataclasses.Field[Any]) -> str:
    choices = option.metadata["choices"]
    if choices:
        return ", ".join(map(_code, choices))
    kinds = [kind.strip() for kind in str(option.type).split("|")]
    return " or ".join(f"`{kind}`" for kind in kinds if kind != "None")


def _code(value: object) -> str:
    """A value as YAML has it."""
    if value is None:
        return "none given"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def page(text: str) -> str:
    """The page with the table of today's options in it."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: {BEGIN} or {END} is missing")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
