"""Runs of this folder's tests end detached, whatever a rank's function has attached or raised."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from with_megatron.seam_runs import detached
from worker_pool import WorkerPool


@pytest.fixture
def pool(pool: WorkerPool) -> SimpleNamespace:
    """WorkerPool.run, for functions of test modules."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        module = sys.modules[function.__module__]
        folder = Path(str(module.__file__)).parents[module.__name__.count(".")]
        return pool.run(detached, str(folder), module.__name__, function.__qualname__, *args, **kwargs)

    return SimpleNamespace(run=run)
