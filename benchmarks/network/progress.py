"""Shows the progress of the network benchmark: the current cell, the finished cells and the time left."""

from __future__ import annotations

import sys
import time
from itertools import groupby
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks.network.plan import Plan
from benchmarks.network.results import Cell

_BUILD_SECONDS = 3.0


class Show:
    """Shows a bar on a terminal, elsewhere a line for each cell; on stderr, because stdout has the table.

    The time left is estimated from each cell's bytes and the last unshaped step, and corrected by the ratio
    of measured to estimated time so far.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        self._unshaped = 0.3
        self._spent = 0.0
        self._expected = 0.0
        self._cell_started = 0.0
        self._left = list(plan.cells)
        self.console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} cells"),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self.progress.add_task("", total=len(self._left), left="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def say(self, what: str) -> None:
        """Show what the benchmark is doing between cells."""
        self._update(what)
        if not self.console.is_terminal and not self._spent and len(self._left) == len(self._plan.cells):
            self.console.print(f"{what}, about {self.left() / 60:.1f} min in all", highlight=False)

    def learned(self, unshaped_seconds: float) -> None:
        """Record how long a step with one microbatch takes without limits."""
        self._unshaped = unshaped_seconds

    def begin(self, cell: Cell) -> None:
        self._cell_started = time.monotonic()
        self._update(_name(cell))

    def end(self, cell: Cell, row: dict[str, Any]) -> None:
        self._spent += time.monotonic() - self._cell_started
        self._expected += self._plan.estimate(cell, self._unshaped)
        self._left.remove(cell)
        self.progress.advance(self._task)
        if not self.console.is_terminal:
            done = len(self._plan.cells) - len(self._left)
            self.console.print(
                f"{done}/{len(self._plan.cells)}  {_name(cell)}: {row['step_seconds']:.3f} s/step, "
                f"exchange {row['exchange_seconds']:.3f} s; {_minutes(self.left())} left",
                highlight=False,
            )

    def left(self) -> float:
        """Return the estimated seconds until the end."""
        correction = self._spent / self._expected if self._expected else 1.0
        cells = sum(self._plan.estimate(cell, self._unshaped) for cell in self._left)
        builds = [build for build, _ in groupby((cell.method, cell.accumulation) for cell in self._left)]
        settling = sum(self._plan.estimate_settling(*build, self._unshaped) for build in builds)
        start = 0.0 if self._spent else 10.0 + 2.0 * self._plan.hosts * self._plan.ranks_per_host
        return correction * cells + len(builds) * _BUILD_SECONDS + settling + start

    def _update(self, what: str) -> None:
        self.progress.update(self._task, description=what, left=f"{_minutes(self.left())} left")


def _name(cell: Cell) -> str:
    rate = "unshaped" if cell.rate_mbit is None else f"{cell.rate_mbit:g} Mbit/s"
    return f"{cell.method.name}, {rate}, accumulation {cell.accumulation}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
