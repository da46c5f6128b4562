"""Seam: times the calls in which a step waits for a bucket group's exchanges, Megatron's own or ours.

The field calls the sum exposed communication. On CUDA two events on the stream that computes time a call: the
stream reaches the second one when what it waits for is there. The host waits for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megatron_patch.megatron import patching, symbols
from megatron_patch.session.session import Session

_METHODS = [
    path.rpartition(".")[2] for path in (symbols.START_GRAD_SYNC, symbols.START_PARAM_SYNC, *symbols.FINISHES)
]
"""Those that start an exchange wait for it without overlap; with overlap they may wait for an earlier one,
and on a CPU they compress."""


class Waits:
    """Overrides these methods of one model chunk's bucket groups until `detach`."""

    def __init__(self, groups: Sequence[Any], session: Session) -> None:
        self._overrides = [_timed(group, name, session) for group in groups for name in _METHODS]
        session.sees_waits = True

    def detach(self) -> None:
        for override in reversed(self._overrides):
            override.undo()


def _timed(group: Any, name: str, session: Session) -> patching.Override:
    original = getattr(group, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with session.waiting():
            return original(*args, **kwargs)

    return patching.override(group, name, timed)
