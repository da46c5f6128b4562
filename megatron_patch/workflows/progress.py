"""One live line about a run, read from its metrics.jsonl: step, loss, speed, time left.

On a terminal the line is redrawn in place; elsewhere a plain line comes about every tenth of the run. There
is no refreshing thread: ranks are forked from this process, and a fork must not meet a held lock.

A run that goes on from a checkpoint writes its metrics.jsonl anew (integration/metrics.py): a file that was
there before is left alone until it is replaced, and the time left comes from the steps made since.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class StepProgress:
    """Follows `metrics`, a metrics.jsonl that a run appends to, from step `done` to `steps`; `tick` often."""

    def __init__(self, label: str, steps: int, metrics: Path, done: int = 0) -> None:
        self._label = label
        self._steps = steps
        self._path = metrics
        self._last: dict[str, Any] = {}
        self._printed = done
        self._begin()
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(label, total=max(steps, 1), completed=done, shown="starting")

    def _begin(self) -> None:
        """Wait for a metrics file other than the one that is there now."""
        self._position = 0
        self._first: tuple[float, int] | None = None
        self._stale = self._path.stat().st_ino if self._path.exists() else None

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        if self._console.is_terminal:
            self._progress.stop()

    def say(self, line: str) -> None:
        """Show a line of its own; what it tells of has all ranks started again."""
        self._begin()
        self._progress.update(self._task, shown="starting again")
        self._console.print(f"{self._label}: {line}", highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Read what is new and show it."""
        fresh = self._read()
        if self._console.is_terminal:
            if fresh:
                self._progress.update(self._task, completed=self._last["step"], shown=self._shown())
            self._progress.refresh()
        elif fresh and self._last["step"] >= self._printed + self._steps / 10:
            self._printed = self._last["step"]
            self._console.print(
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
        return f"{shown}{seconds / steps:.2f} s/step  {int(left) // 60}:{int(left) % 60:02d} left"
