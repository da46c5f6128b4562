"""Files that are whole at every moment: written beside their place, then moved into it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
