"""What the parts share: their device and time, and how they tell what they find while they run."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARK = "GPU-RESULT "
"""What begins a line with results; the command joins those of a part."""
END = "MEGATRON_LOCO_PART_END"
"""The variable with the time.monotonic() at which the command ends the part."""


def remains() -> float:
    """Return how many seconds the part still has."""
    return float(os.environ.get(END, "inf")) - time.monotonic()


def tell(**found: Any) -> None:
    """Print results in one line, on rank 0 alone. They count even if the part is stopped later."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{MARK}{json.dumps(_short(found))}\n")  # In one piece: processes share the pipe.
        sys.stdout.flush()


def _short(found: Any) -> Any:
    """Round numbers to six digits."""
    if isinstance(found, dict):
        return {key: _short(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_short(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def attempt(what: str, measure: Callable[..., object], *args: Any) -> None:
    """Run a measurement; an error is told as a failed check, and the next measurement runs."""
    try:
        measure(*args)
    except Exception as error:
        traceback.print_exc()
        tell(checks={f"{what}: {type(error).__name__}: {str(error)[:300]}": False})


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
