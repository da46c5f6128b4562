"""Files: written whole, beside their place and then moved into it; and read without executing anything.

What is read may be another user's YAML or JSON: it is refused in one line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, in UTF-8: a reader, or a kill, finds the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def check_output(folder: Path, option: str = "out") -> None:
    """See that `folder` is one, or could be created; creates nothing.

    Raises:
        UserError: a file is in its place, or in that of a folder above it; or nothing may be written there.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    problem = None if above.is_dir() else errno.ENOTDIR
    if problem is None and not os.access(above, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise UserError(f"{option}: {folder} cannot be written: {above}: {os.strerror(problem)}")


def output_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder of a command's results, before the command computes them.

    Raises:
        UserError: it cannot be created, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror}") from error


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
