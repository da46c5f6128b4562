"""UserError and other failures that end a command with one line; the source text of a failed assert."""

from __future__ import annotations

import difflib
import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """The user's mistake, shown as one line, `megatron-loco: error: ...`, with exit status 2.

    What a message quotes may come from anybody's file: line ends and what drives a terminal are escaped, and
    the middle of a very long message is left out.
    """

    def __init__(self, message: object) -> None:
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
        super().__init__(text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}")


class RankFailed(Exception):
    """A rank ended before its time; the text names the first one and shows its error. Exit status 1."""


def nearest(value: object, allowed: Iterable[object]) -> str:
    """` (did you mean X?)` for a value close to an allowed one, else an empty string."""
    matches = difflib.get_close_matches(str(value), [str(item) for item in allowed], n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches and matches[0] != str(value) else ""


def failed_assert(error: AssertionError) -> tuple[str, str]:
    """Where the assert stands, `file.py:12`, and its source on one line, `assert a < b`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "", ""
    last, first = frames[-1], frames[-1].lineno or 0
    lines = [linecache.getline(last.filename, n) for n in range(first, (last.end_lineno or first) + 1)]
    source = re.sub(r"\s*\\?\s+", " ", " ".join(lines)).strip()
    return f"{Path(last.filename).name}:{first}", source
