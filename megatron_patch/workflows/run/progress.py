"""Shows the progress of one run, read from its metrics.jsonl (step, loss, speed, time left), or of several.

On a terminal the line is redrawn in place; elsewhere one is printed about every tenth of the run. No thread
refreshes it, because ranks are forked from this process, and a fork must not happen while a lock is held.

A run that resumes from a checkpoint rewrites its metrics.jsonl (megatron/metrics.py): an existing file is
ignored until it is replaced, and the time left is estimated from the steps made since.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Live:
    """Shows `progress` within a `with` block if its console is a terminal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.console = progress.console

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()


class Board(Live):
    """A bar over `total` runs, of which `done` exist already, with the bar of the current run below it.

    Without a terminal it prints a line per run. The time left is estimated from the mean time of the runs
    made so far.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        super().__init__(_bars())
        self._total = total
        self._left = total - done
        self._seconds: list[float] = []
        self._began = time.monotonic()
        self._task = self.progress.add_task(label, total=max(total, 1), completed=done, shown="runs")

    def begin(self) -> None:
        """Note that a run begins, to measure its time."""
        self._began = time.monotonic()

    def end(self, line: str) -> None:
        """Advance the bar when a run has ended, and print `line`, which says how it ended."""
        self._seconds.append(time.monotonic() - self._began)
        self._left -= 1
        left = _time(self._left * sum(self._seconds) / len(self._seconds))
        self.progress.update(self._task, advance=1, shown=f"runs  {left} left")
        self.console.print(
            f"{self._total - self._left}/{self._total}  {line}; {left} left", highlight=False, soft_wrap=True
        )


class StepProgress(Live):
    """Follows `metrics`, the metrics.jsonl of a run, from step `done` to `steps`; call `tick` often.

    With a `board` it is a line of that board, and prints nothing without a terminal.
    """

    def __init__(
        self, label: str, steps: int, metrics: Path, done: int = 0, board: Board | None = None
    ) -> None:
        super().__init__(board.progress if board else _bars())
        self._label = label
        self._steps = steps
        self._path = metrics
        self._last: dict[str, Any] = {}
        self._printed = done
        self._begin()
        self._board = board
        self._task = self.progress.add_task(label, total=max(steps, 1), completed=done, shown="starting")

    def _begin(self) -> None:
        """Ignore the metrics file that exists now, until another one replaces it."""
        self._position = 0
        self._first: tuple[float, int] | None = None
        self._stale = self._path.stat().st_ino if self._path.exists() else None

    def __enter__(self) -> Self:
        return self if self._board else super().__enter__()

    def __exit__(self, *problem: object) -> None:
        self.tick()
        if self._board:
            self.progress.remove_task(self._task)
        else:
            super().__exit__(*problem)

    def say(self, line: str) -> None:
        """Print a line about a restart of all ranks, and wait for their new metrics file."""
        self._begin()
        self.progress.update(self._task, shown="starting again")
        self.console.print(f"{self._label}: {line}", highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Read new records and show the last one."""
        fresh = self._read()
        if self.console.is_terminal:
            if fresh:
                self.progress.update(self._task, completed=self._last["step"], shown=self._shown())
            self.progress.refresh()
        elif fresh and not self._board and self._last["step"] >= self._printed + self._steps / 10:
            self._printed = self._last["step"]
            self.console.print(
                f"{self._label}: step {self._printed}/{self._steps}  {self._shown()}", highlight=False
            )

    def _read(self) -> bool:
        if not self._path.exists() or self._path.stat().st_ino == self._stale:
            return False
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        self._position += whole
        if not whole:
            return False
        self._last = json.loads(data[:whole].splitlines()[-1])
        if self._first is None:
            self._first = (time.monotonic(), self._last["step"])
        return True

    def _shown(self) -> str:
        loss = self._last["loss"]
        shown = f"loss {loss:.3f}  " if loss is not None else ""
        assert self._first is not None
        seconds, steps = time.monotonic() - self._first[0], self._last["step"] - self._first[1]
        if steps <= 0:
            return shown + "estimating time left"
        left = seconds / steps * (self._steps - self._last["step"])
        return f"{shown}{seconds / steps:.2f} s/step  {_time(left)} left"


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, markup=False),  # Lines of ranks may contain brackets.
        auto_refresh=False,
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
