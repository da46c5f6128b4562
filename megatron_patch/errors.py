"""The user's mistakes, and how they are told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The user's mistake, shown as one line, `megatron-loco: error: ...`, with exit status 2."""


def nearest(value: object, allowed: Iterable[object]) -> str:
    """` (did you mean X?)` for a value close to an allowed one, else an empty string."""
    matches = difflib.get_close_matches(str(value), [str(item) for item in allowed], n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches and matches[0] != str(value) else ""
