"""What every rank of a soaked run shares with the harness: its process, and which kill is due.

One small file of 64-bit numbers, mapped by all: a row per rank (`PID`, `STEPS`), and a first row with the
number of kills so far. It outlives the ranks, so `STEPS` counts the training steps of all attempts together.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PID, STEPS = range(2)


@dataclass(frozen=True)
class Kill:
    """A kill that is due in one attempt: at the `nth` pass of `rank` through `point`, or after `seconds`."""

    rank: int
    point: str | None = None
    nth: int = 1
    seconds: float = 0.0


class Board:
    """The shared file in `folder`; `plan` is written once, by the harness."""

    def __init__(self, folder: Path, ranks: int | None = None) -> None:
        self._plan, self._kills = folder / "plan.json", folder / "kills"
        path = folder / "board"
        if ranks is not None:
            np.zeros((ranks + 1, 2), np.int64).tofile(path)
            self._kills.touch()
        self.numbers = np.memmap(path, np.int64, mode="r+").reshape(-1, 2)

    def plan(self, kills: list[Kill]) -> None:
        self._plan.write_text(json.dumps([asdict(kill) for kill in kills]), encoding="utf-8")

    @property
    def killed(self) -> int:
        return int(self.numbers[0, 0])

    def due(self) -> Kill | None:
        """The kill of the attempt that is running now: one for each, then none."""
        plan = json.loads(self._plan.read_text(encoding="utf-8"))
        return Kill(**plan[self.killed]) if self.killed < len(plan) else None

    def row(self, rank: int) -> np.ndarray:
        return self.numbers[rank + 1]

    def kill(self, kill: Kill) -> None:
        """End the rank, and note it; nothing if it has ended by itself."""
        pid = int(self.row(kill.rank)[PID])
        command = Path(f"/proc/{pid}/cmdline")
        if not command.exists() or not command.read_bytes():  # empty: waits to be reaped
            return
        self.numbers[0, 0] += 1
        with self._kills.open("a", encoding="utf-8") as stream:
            stream.write(f"{kill.point or 'at random'}\n")
        os.kill(pid, signal.SIGKILL)

    def kills(self) -> list[str]:
        """Where ranks have been killed."""
        return self._kills.read_text(encoding="utf-8").splitlines()
