"""The errors that end a command with a one-line message, and the one line of any other error."""

from __future__ import annotations

import difflib
import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """A mistake of the user's, shown as one line, `megatron-loco: error: ...`, with exit status 2.

    A message may quote text from anybody's file: characters that are not printable are escaped, and the
    middle of a message of more than 2,000 characters is left out.
    """

    def __init__(self, message: object) -> None:
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
        super().__init__(text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}")


class RankFailed(Exception):
    """A rank ended too early: the text names the first such rank and shows its error. Exit status 1."""


def nearest(value: object, allowed: Iterable[object]) -> str:
    """Return ` (did you mean X?)` for a value close to the allowed value X, else an empty string."""
    matches = difflib.get_close_matches(str(value), [str(item) for item in allowed], n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches and matches[0] != str(value) else ""


def in_one_line(error: Exception) -> str:
    """Return an error's class and message; of a bare assert the place and source, `a.py:1: assert b`."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and not text:
        text = _failed_assert(error)
    return f"{type(error).__name__}: {text}"


def _failed_assert(error: AssertionError) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last, first = frames[-1], frames[-1].lineno or 0
    lines = [linecache.getline(last.filename, n) for n in range(first, (last.end_lineno or first) + 1)]
    source = re.sub(r"\s*\\?\s+", " ", " ".join(lines)).strip()
    return f"{Path(last.filename).name}:{first}: {source}"
