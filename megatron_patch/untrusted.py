"""YAML and JSON that another user may have written: read within bounds, refused in one line.

Both parsers build what a text asks for: a kilobyte of YAML aliases asks for gigabytes, thousands of brackets
for as many stack frames, a long number for minutes of arithmetic. What runs, recipes and clusters are
described by is small, so the bounds here are far above it. Loaders never execute what they read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Of a YAML file."""
MOST_NODES = 10_000
"""Of a YAML file, aliases expanded."""
DEEPEST = 16
"""Mappings and lists in one another, in YAML."""
LONGEST = 1 << 16
"""Characters of one YAML value."""
_MOST_INTEGER = 1 << 63
_MOST_NUMBER = 1e100


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
        Unfit: no YAML, or YAML beyond the bounds (`check_yaml`, `check_numbers`).
    """
    import yaml

    check_yaml(text)
    try:
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # ValueError: a day that is none
        raise Unfit(yaml_problem(error)) from error
    check_numbers(content)
    return content


def check_yaml(text: str) -> None:
    """See that a YAML text is within the bounds, before anything is built of it.

    Raises:
        Unfit: no YAML; too deep, too many nodes, a key that is there twice, an anchor inside itself.
    """
    import yaml

    sizes: dict[str, int] = {}  # of each anchor's node, aliases expanded
    above: list[_Collection] = []
    whole = _Collection(None, False)
    events = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        for event in events:
            parent = above[-1] if above else whole
            line = event.start_mark.line + 1
            nodes = 1
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise Unfit(f"line {line}: *{event.anchor} is no anchor that is complete here")
                nodes = sizes[event.anchor]
            elif isinstance(event, yaml.ScalarEvent):
                if len(event.value) > LONGEST:
                    raise Unfit(f"line {line}: a value of more than {LONGEST:,} characters")
                if event.anchor:
                    sizes[event.anchor] = 1
                parent.key(event.value, line)
            elif isinstance(event, yaml.CollectionStartEvent):
                above.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
                if len(above) > DEEPEST:
                    raise Unfit(f"line {line}: more than {DEEPEST} mappings and lists in one another")
                continue
            elif isinstance(event, yaml.CollectionEndEvent):
                ended = above.pop()
                parent, nodes = above[-1] if above else whole, ended.nodes
                if ended.anchor:
                    sizes[ended.anchor] = nodes
            else:  # of streams and documents
                continue
            parent.children += 1
            parent.nodes += nodes
            if parent.nodes > MOST_NODES:
                raise Unfit(f"line {line}: more than {MOST_NODES:,} values, aliases expanded")
    except yaml.YAMLError as error:
        raise Unfit(yaml_problem(error)) from error


class _Collection:
    """A mapping or a list that is being read."""

    def __init__(self, anchor: str | None, mapping: bool) -> None:
        self.anchor = anchor
        self.nodes = 1
        self.children = 0
        self._keys: set[str] | None = set() if mapping else None

    def key(self, value: str, line: int) -> None:
        """Take note of a scalar: of a mapping's children every other one is a key."""
        if self._keys is None or self.children % 2:
            return
        if value in self._keys:
            raise Unfit(f"line {line}: the key {value[:60]!r} is there twice")
        self._keys.add(value)


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
        Unfit: no JSON, brackets too deep, text that UTF-8 cannot hold, a number that no run writes.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        content = json.loads(text, parse_int=_integer, parse_float=_number)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Unfit("too many brackets in one another") from error
    except UnicodeEncodeError as error:
        raise Unfit("it holds half of a character") from error
    except ValueError as error:
        raise Unfit(str(error)) from error
    return content


def check_numbers(content: Any) -> None:
    """See that the numbers in nested mappings and lists are ones to calculate with.

    Raises:
        Unfit: a whole number of more than 64 bits, or one beyond 1e100.
    """
    for value in leaves(content):
        if isinstance(value, int) and not -_MOST_INTEGER <= value < _MOST_INTEGER:
            raise Unfit(f"a whole number of {value.bit_length()} bits: 64 at most")
        if isinstance(value, float) and math.isfinite(value) and abs(value) > _MOST_NUMBER:
            raise Unfit(f"the number {value}: {_MOST_NUMBER} at most")


def leaves(content: Any) -> Iterator[Any]:
    """Keys and values of nested mappings and lists."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from leaves(value)
    elif isinstance(content, list | tuple | set):
        for value in content:
            yield from leaves(value)
    else:
        yield content


def _integer(text: str) -> int:
    if len(text) > 20 or not -_MOST_INTEGER <= int(text) < _MOST_INTEGER:
        raise ValueError(f"the whole number {text[:20]}... has more than 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isfinite(value) and abs(value) > _MOST_NUMBER:
        raise ValueError(f"the number {text[:20]} is beyond {_MOST_NUMBER}")
    return value
