"""What all tests share: the pool of warm worker processes, and how two pytest processes run side by side.

`make test` starts one pytest process a core (pytest-xdist), each with a pool of its own. Ranks on one core
wake one another far cheaper than across cores, and several of them keep a core busy: so each process stays
on its core, and all of a file's tests in one process. Root's pools have a loopback interface each; without
root, tests that read its counters run while no other does:

    @pytest.mark.alone
"""

from __future__ import annotations

import fcntl
import os
import tempfile

# Read as Triton is imported, which torch may do; `make test-gpu` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiers
from worker_pool import WorkerPool

LONG = (
    "test_engine.py",
    "test_gpu.py",
    "test_order.py",
    "test_parallelism.py",
    "test_ptx.py",
    "test_resume.py",
    "test_torch_scripts.py",
    "test_weight_code.py",
)
"""Files of half a minute and more begin early, or one process would be left with them."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: it counts bytes on the loopback interface")
    number, processes = _place(config)
    if processes > 1:
        cores = sorted(os.sched_getaffinity(0))
        # What the process starts stays there too: the workers, commands, the engine's ranks.
        os.sched_setaffinity(0, cores[number % len(cores) :: processes])


def _place(config: pytest.Config) -> tuple[int, int]:
    """This pytest process's number, and how many there are; (0, 1) without pytest-xdist."""
    worker = getattr(config, "workerinput", None)
    return (int(worker["workerid"].removeprefix("gw")), worker["workercount"]) if worker else (0, 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    many, seen = tiers.with_many_cases(), set()
    for item in items:
        file = item.path.relative_to(tiers.HERE).as_posix()
        function = f"{file}::{item.name.partition('[')[0]}"
        mark = tiers.mark_of(file) or ("thorough" if function in many and function in seen else None)
        if mark:
            item.add_marker(mark)
        elif not item.get_closest_marker("slow"):
            seen.add(function)
    if _place(config)[1] > 1:
        items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Every test, with its fixtures, holds a lock: shared with others, or by itself."""
    if _place(item.config)[1] == 1 or os.geteuid() == 0:
        return (yield)
    with Path(tempfile.gettempdir(), f"megatron-loco-tests-{os.getppid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        Path(tempfile.gettempdir(), f"megatron-loco-tests-{os.getpid()}.lock").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four workers that have imported torch and Megatron; more are forked when a test asks for them."""
    with WorkerPool(4) as workers:
        yield workers
