"""Atomic writing of files, and reading of YAML and JSON that another user may have written.

A file is written under another name and then moved into its place. Reading executes nothing; a text that
cannot be read raises `Unfit` with one line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically: `path` is at all times the old file or the new one.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
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
    """Check that `folder` is a writable folder or could be created; creates nothing.

    Raises:
        UserError: `folder` or a folder above it is a file, or is not writable.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    problem = None if above.is_dir() else errno.ENOTDIR
    if problem is None and not os.access(above, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise UserError(f"{option}: {folder} cannot be written: {above}: {os.strerror(problem)}")


def output_folder(folder: Path, option: str = "--out") -> None:
    """Check and create the folder for a command's results before the command computes them."""
    check_output(folder, option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror}") from error


def output_file(path: Path, option: str = "--json") -> None:
    """Check that a command can write its results to a file, and create the file's folder."""
    output_folder(path.parent, option)
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder; name a file")


DEEPEST = 100
"""The deepest nesting of YAML that is read: with thousands of levels libyaml's loader ends the process."""


class Unfit(ValueError):
    """A text cannot be read; the message is one line without the file's name."""


def load_yaml(path: Path) -> tuple[str, Any]:
    """Read a YAML file; returns its text and its plain values.

    Raises:
        OSError: the file cannot be read.
        Unfit: it is not valid YAML, or is nested too deeply.
    """
    import yaml

    text = read_yaml(path)
    try:
        return text, yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (yaml.YAMLError, ValueError, TypeError) as error:  # A date that does not exist is a ValueError.
        raise Unfit(yaml_problem(error)) from error


def read_yaml(path: Path) -> str:
    """Read the text of a YAML file that libyaml's loader loads without a crash; errors as of load_yaml."""
    import yaml

    depth = 0
    try:
        text = path.read_text(encoding="utf-8")
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # noqa: TID251
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                line = event.start_mark.line + 1
                raise Unfit(f"line {line}: more than {DEEPEST} mappings and lists in one another")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unfit(yaml_problem(error)) from error
    return text


def yaml_problem(error: Exception) -> str:
    """Describe a YAML error in one line, with the line number if it is known."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem and mark is not None:
        return f"line {mark.line + 1}: {problem}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text, in which NaN and Infinity are accepted as numbers.

    Raises:
        Unfit: the text is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unfit("too many brackets in one another") from error
    except ValueError as error:
        raise Unfit(str(error)) from error
