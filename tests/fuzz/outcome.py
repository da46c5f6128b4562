"""What a loader makes of an input."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_patch.errors import UserError

from .bounds import bounded
from .loaders import Loader

_NAMED_OTHERWISE = re.compile(r"compression\.\w+: |--gpu: |--cluster: |'?/")
"""A key that a flag may have set, too, or another file that the input names."""


def outcome(loader: Loader, folder: Path, data: bytes) -> str:
    """`read` or `refused`.

    Raises:
        AssertionError: what was read is not what is there, or the refusal is not one line with the file.
        Exception: whatever else the loader ends with.
    """
    try:
        with bounded():
            loader.read(folder, data)
    except UserError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert len(message) <= 2000, message[:200]
        assert str(folder) in message or _NAMED_OTHERWISE.match(message), message
        return "refused"
    return "read"
