"""YAML and JSON of other users: parsed without executing anything, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""The size of a YAML file: what describes runs, recipes and clusters is small."""
DEEPEST = 100
"""Mappings and lists in one another, in YAML: libyaml's loader ends the process with thousands of them."""


class Unfit(ValueError):
    """A text that cannot be read; the message is one line without the file's name."""


def read_text(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        OSError: it cannot be read.
        Unfit: it is too long, or not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Unfit(f"it is longer than {MOST_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unfit(f"it is no UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error


def load_yaml(text: str) -> Any:
    """What a YAML text says, made of plain values.

    Raises:
        Unfit: it is no YAML.
    """
    import yaml

    check_yaml(text)
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError) as error:  # A day that is none is a ValueError.
        raise Unfit(yaml_problem(error)) from error


def check_yaml(text: str) -> None:
    """See that a text is YAML that a loader survives.

    Raises:
        Unfit: it is no YAML, or too deep.
    """
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                line = event.start_mark.line + 1
                raise Unfit(f"line {line}: more than {DEEPEST} mappings and lists in one another")
    except yaml.YAMLError as error:
        raise Unfit(yaml_problem(error)) from error


def yaml_problem(error: Exception) -> str:
    """What a YAML error says, in one line with the place."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem and mark is not None:
        return f"line {mark.line + 1}: {problem}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def load_json(text: str | bytes) -> Any:
    """What a JSON text says; NaN and Infinity are numbers.

    Raises:
        Unfit: it is no JSON, or too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unfit("too many brackets in one another") from error
    except ValueError as error:
        raise Unfit(str(error)) from error
