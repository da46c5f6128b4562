"""The runs of a soak: one undisturbed, then disturbed ones until enough kills have happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_patch.errors import RankFailed
from megatron_patch.workflows import train
from megatron_patch.workflows.run import configuration, run_folder
from megatron_patch.workflows.run.prepare import prepare_run

from .board import PID, Board, Kill
from .board import STEPS as STEPS_MADE

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_INTERVAL = 60, 3
# Aimed kills: the point, how many passes of it an attempt may see first, and whether rank 0 alone passes it.
POINTS = [
    *((f"load: {where}", 1, False) for where in ("begins", "done")),
    *((f"exchange: {where}", 48, False) for where in ("begins", "under way", "awaited", "done")),
    *((f"optimizer: {where}", 12, False) for where in ("begins", "weights not gathered", "done")),
    ("step done", 12, False),
    *((f"save: {where}", 4, False) for where in ("begins", "announced")),
    ("save: inside a file", 40, False),
    *(
        (f"save: {w}", 4, True)
        for w in ("no metadata", "files complete", "before tracker", "tracker emptied")
    ),
]

MODEL = [
    "num_layers=2",
    "hidden_size=64",
    "num_attention_heads=4",
    "seq_length=32",
    "max_position_embeddings=32",
    "micro_batch_size=2",
    "global_batch_size=8",
    "ddp_bucket_size=20000",
    "lr_warmup_iters=1",
    "eval_iters=1",
    "log_interval=1",
    "mock_data=true",
    "tokenizer_type=NullTokenizer",
    "vocab_size=257",
]


@dataclass(frozen=True)
class Soak:
    """What is trained, and how it is disturbed."""

    folder: Path
    method: str = "loco"
    tensor_parallel: int = 1
    steps: int = STEPS
    seed: int = 0
    settings: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return 2 * self.tensor_parallel


@dataclass
class Tally:
    """What happened to the disturbed runs; `points` are where ranks were killed."""

    points: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    restarts: int = 0
    resumed: int = 0
    repeated_steps: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.points.total()


class Runs:
    """Starts runs from this process, which imports Megatron once."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._random = random.Random(soak.seed)

    def _prepare(self, folder: Path, max_restarts: int) -> Any:
        soak = self._soak
        megatron = [*MODEL, f"train_iters={soak.steps}", f"save_interval={SAVE_INTERVAL}"]
        if soak.tensor_parallel > 1:
            megatron += [f"tensor_model_parallel_size={soak.tensor_parallel}", "sequence_parallel=true"]
        overrides = [
            *(f"megatron.{setting}" for setting in megatron),
            *("data.path=null", "data.source=null", f"launch.nproc_per_node={soak.ranks}"),
            *(f"launch.script={ROOT / 'tests/soak/script.py'}", f"launch.max_restarts={max_restarts}"),
            *soak.settings,
        ]
        recipe = configuration.method_recipe(soak.method)
        model = ROOT / "configs/models/llama_tiny_bf16.yaml"  # whose weights the recipe gathers exactly
        run = configuration.load(model, overrides, and_files=[recipe])
        return prepare_run(run, folder)

    def undisturbed(self) -> Path:
        """The run that all others are compared with."""
        folder = self._soak.folder / "undisturbed"
        board = self._board(folder)
        board.plan([])
        self._execute(folder, 0)
        return folder

    def _board(self, folder: Path) -> Board:
        folder.mkdir(parents=True)
        os.environ["SOAK_BOARD"] = str(folder)
        return Board(folder, self._soak.ranks)

    def _execute(self, folder: Path, max_restarts: int, resume: bool = False) -> None:
        prepared = self._prepare(folder, max_restarts)
        train.execute(prepared, folder.name, overwrite=not resume, resume=resume)

    def disturbed(self, plan: Sequence[Kill], tally: Tally) -> Path:
        """One run with a kill in each of its first attempts, gone on with until it has come to its end."""
        tally.runs += 1
        folder = self._soak.folder / f"disturbed-{tally.runs}"
        board = self._board(folder)
        board.plan(list(plan))
        killer = os.fork()
        if not killer:
            _kill_at_random(board, len(plan))
        restarts = self._random.randint(len(plan) // 2, len(plan))
        try:
            while True:
                before, resume = board.killed, run_folder.latest_step(folder / "checkpoints") is not None
                tally.resumed += resume
                try:
                    self._execute(folder, restarts, resume)
                    break
                except RankFailed:
                    tally.restarts += min(restarts, board.killed - before)
                    if board.killed == before:
                        raise
        finally:
            os.kill(killer, signal.SIGKILL)
            os.waitpid(killer, 0)
        tally.restarts += board.killed - before
        tally.points.update(board.kills())
        tally.repeated_steps += int(board.row(0)[STEPS_MADE]) - self._soak.steps
        return folder

    def plan(self, kills: int) -> list[Kill]:
        """Kills for one run, half of them aimed."""
        return [self._kill() for _ in range(kills)]

    def _kill(self) -> Kill:
        draw = self._random
        rank = draw.randrange(self._soak.ranks)
        if draw.random() < 0.5:
            return Kill(rank, seconds=draw.uniform(0.2, 4.0))
        point, passes, only_rank_0 = draw.choice(POINTS)
        return Kill(0 if only_rank_0 else rank, point, draw.randint(1, passes))


def _kill_at_random(board: Board, kills: int) -> None:
    """In a process of its own: the kills that are due after some seconds of an attempt."""
    try:
        for number in range(kills):
            kill = board.due()
            assert kill is not None
            old = [int(row[PID]) for row in board.numbers[1:]]
            while kill.point is not None and board.killed == number:
                time.sleep(0.01)  # aimed: the rank does it
            if kill.point is not None:
                continue
            while int(board.row(kill.rank)[PID]) == old[kill.rank]:
                time.sleep(0.01)
            time.sleep(kill.seconds)
            board.kill(kill)
    finally:
        os._exit(0)
