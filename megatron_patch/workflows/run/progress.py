"""Shows the progress of a run, read from its metrics.jsonl: step, loss, speed, time left.

On a terminal it is a bar; elsewhere a line is printed about every tenth of the run. No thread refreshes the
bar, because ranks are forked from this process, and a fork must not happen while a lock is held.

A run that resumes from a checkpoint rewrites its metrics.jsonl (megatron/metrics.py): an existing file is
ignored until it is replaced, and the time left is estimated from the steps made since.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StepProgress:
    """Follows `metrics`, the metrics.jsonl of a run, from step `done` to `steps`; call `tick` often.

    Of `one_of_many` runs nothing is left when it ends, and nothing is printed without a terminal.
    """

    def __init__(
        self, label: str, steps: int, metrics: Path, done: int = 0, *, one_of_many: bool = False
    ) -> None:
        self._console = Console(stderr=True, markup=False)  # Lines of ranks may contain brackets.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            auto_refresh=False,
            transient=one_of_many,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,  # Of all steps that were seen.
        )
        self._label = label
        self._steps = steps
        self._metrics = metrics
        self._prints = not (one_of_many or self._console.is_terminal)
        self._printed = done
        self._task = self._bar.add_task(label, total=max(steps, 1), completed=done, shown="starting")
        self._ignore_metrics()

    def _ignore_metrics(self) -> None:
        """Ignore the metrics file that exists now, until another one replaces it."""
        self._position = 0
        self._stale = self._metrics.stat().st_ino if self._metrics.exists() else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.tick()
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line about a restart of all ranks, and wait for their new metrics file."""
        self._ignore_metrics()
        self._bar.reset(self._task, shown="starting again")
        self._console.print(f"{self._label}: {line}", highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Read new records and show the last one."""
        if record := self._last_new_record():
            step = record["step"]
            self._bar.update(self._task, completed=step)
            shown = self._shown(record["loss"])
            self._bar.update(self._task, shown=shown)
            if self._prints and step >= self._printed + self._steps / 10:
                self._printed = step
                self._console.print(f"{self._label}: step {step}/{self._steps}  {shown}", highlight=False)
        self._bar.refresh()

    def _last_new_record(self) -> dict[str, Any] | None:
        if not self._metrics.exists() or self._metrics.stat().st_ino == self._stale:
            return None
        with self._metrics.open("rb") as stream:
            stream.seek(self._position)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        self._position += whole
        return json.loads(data[:whole].splitlines()[-1]) if whole else None

    def _shown(self, loss: float | None) -> str:
        (task,) = self._bar.tasks
        shown = f"loss {loss:.3f}  " if loss is not None else ""
        if not task.speed or task.time_remaining is None:
            return shown + "estimating time left"
        return f"{shown}{1 / task.speed:.2f} s/step  {clock(task.time_remaining)} left"


def clock(seconds: float) -> str:
    """Return a time as `1:05`, or `2:01:05` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
