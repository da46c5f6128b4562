"""Runs of this folder's tests end detached, whatever a rank's function has attached or raised."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from with_megatron.seam_runs import detached
from worker_pool import WorkerPool


class Pool:
    """WorkerPool.run, for functions of test modules."""

    def __init__(self, workers: WorkerPool) -> None:
        self.workers = workers

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        module = sys.modules[function.__module__]
        folder = Path(str(module.__file__)).parents[module.__name__.count(".")]
        where = str(folder), module.__name__, function.__qualname__
        return self.workers.run(detached, *where, *args, **kwargs)


@pytest.fixture
def pool(pool: WorkerPool) -> Pool:
    return Pool(pool)
