"""The slow cases of resume_runs.py, for the engine."""

from __future__ import annotations

from integration.resume_runs import SLOW, resumed

RUNS = resumed(SLOW)
