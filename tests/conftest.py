"""Fixtures shared by all tests: the pool of warm worker processes."""

from __future__ import annotations

import os

# Read as Triton is imported, which torch may do; `make test-gpu` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest
from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four workers that have imported torch and Megatron; more are forked when a test asks for them."""
    with WorkerPool(4) as workers:
        yield workers
