"""Measures in the running job what compression gains, in short turns with and without it.

Blocks of BLOCK steps run with each choice in turn, there and back:

    stock | exact | 4 bits | 4 bits + exact | 4 bits + exact | 4 bits | exact | stock      one round

The first step of a block is not counted: with overlap it still gathers the step before, and it may allocate.
The exact gather changes no bit of the training, so that its turns are free of risk. Turns with full gradients
keep the errors of low-bit ones, which are added when low bits are sent again.

Whose turn it is follows from the number of steps, so that no message is needed while a round runs. After a
round, one all-reduce takes every step's seconds on its slowest rank. All ranks then have the same numbers;
the decision is still one rank's, which the others are sent, since logarithms may differ between machines.

With `weight_gather: auto` the estimate decides between Megatron's gather and the exact one, since only speed
is at stake. Low bits are kept or switched off by the user, to whom a trial's table says whether the interval
of the difference leaves out zero.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.config import AUTO
from megatron_patch.session.session import Choice, Kept, Session

logger = logging.getLogger(__name__)

BLOCK = 2
"""Steps of a block, of which all but the first count."""
FEWEST, MOST = 3, 12
"""Rounds after which a trial of the weight gather may end, and ends."""
FIRST = 10
"""A trial begins at a multiple of this many steps, once all ranks compress gradients."""
NARROW = 0.05
"""Such a trial ends where the interval of the difference is narrower than this part of a step, or than the
difference."""
WORTH = 0.01
"""The exact gather is kept if it saves more than this part of a step, since it takes memory, too."""
AGAIN = 1000
"""Steps after which it is looked at whether the bits a weight have halved or doubled."""
SHARE = 0.005
"""The part of all steps that trials of the weight gather after the first one may take."""


class Tried(Protocol):
    """One of the model chunks that an optimizer updates."""

    session: Session

    def sent(self) -> float:
        """Return the bytes that this rank's last step has sent."""

    def has_room(self) -> bool:
        """Return whether the device has memory for the exact gather."""

    def coded(self) -> tuple[float, float]:
        """Return the bytes of the last step's messages of the exact gather, and the weights in them."""


@dataclass(frozen=True)
class Row:
    """What a trial has found out about one choice, on all ranks."""

    choice: str
    seconds: float
    """Of a step on its slowest rank, as the geometric mean over rounds."""
    megabytes: float
    """What a rank sends to others in a step, in MB of 10^6 bytes."""
    percent: float | None = None
    """How much longer its steps are than stock's; None for stock itself."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval of `percent` (Student's, over rounds)."""

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return "keep it" if self.high < 0 else "switch it off" if self.low > 0 else "no difference found"

    def __str__(self) -> str:
        text = f"{self.choice:<29} {self.seconds:8.4f} s a step {self.megabytes:10.3f} MB a rank"
        if self.percent is None:
            return text
        return f"{text}  {self.percent:+6.1f} % ({self.low:+.1f} to {self.high:+.1f})  {self.verdict}"


@dataclass(frozen=True)
class Table:
    """The result of `compression.trial`."""

    step: int
    """The job's step after which the trial has ended."""
    steps: int
    """How many steps it took."""
    rows: Sequence[Row]


class Trial:
    """The turns of the chunks that one optimizer updates; all ranks that step it make one.

    Args:
        chunks: the chunks, which have the same options.
        groups: process groups that together connect these ranks, as the axes of a grid.
        codes: whether the exact gather can serve weights of this rank; None if it must not be tried.
        gradients: the dtype in which stock sends gradients, which the table names.
    """

    def __init__(
        self,
        chunks: Sequence[Tried],
        groups: Iterable[dist.ProcessGroup],
        codes: bool | None,
        gradients: torch.dtype = torch.float32,
    ) -> None:
        self._chunks = chunks
        self._session = chunks[0].session
        self._config = self._session.config
        self._groups = [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]
        self._leads = all(group.rank() == 0 for group in self._groups)
        self._mine = codes
        self._stock = f"stock, {_SHORT.get(gradients, gradients)} gradients"
        self._codes = False
        """Whether the exact gather can serve weights of any rank."""
        self._steps = 0
        self._marks: list[Any] = []
        """The times at which the round began and its steps ended; none between trials."""
        self.table: Table | None = None
        """The table of `compression.trial`, once it is there."""

    def step_ended(self) -> None:
        """Note the end of a step, and choose for the next one."""
        self._steps += 1
        if not self._marks:
            self._look()
            return
        self._marks.append(self._now())
        step = len(self._marks) - 2
        if any(chunk.session.disturbed for chunk in self._chunks):
            self._out.add(step)
        if step % BLOCK == BLOCK - 1:
            self._count(self._order[step // BLOCK])
        if step + 1 == len(self._order) * BLOCK:
            self._end_round()
        else:
            self._choose(self._choices[self._order[(step + 1) // BLOCK]])

    # --- between trials ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin a trial if it is time, or look at what the exact gather would send now."""
        auto, kept = self._config.weight_gather == AUTO, self._session.kept
        if self._steps == 1:
            here, fails = self._reduced([bool(self._mine), self._mine is None], dist.ReduceOp.MAX)
            self._codes = bool(here and not fails)
            if auto and kept is not None and kept.weights and self._has_room():  # as before a resume
                self._choose(Choice(weights=True))
        if self._asked or (auto and self._codes and kept is None):
            if self._steps % FIRST == 0:
                waits = self._config.compresses and not self._config.is_onebit_adam
                (not_yet,) = self._reduced([waits and not self._session.ledger.active], dist.ReduceOp.MAX)
                if not not_yet and (self._has_room() or self._asked):
                    self._begin()
        elif auto and self._codes and kept is not None and self._steps % AGAIN == 0:
            if self._session.choice.weights or self._has_room():
                self._choose(Choice(weights=True))
        elif auto and kept is not None and self._session.choice.weights and self._steps % AGAIN == BLOCK:
            self._look_again(kept)

    def _has_room(self) -> bool:
        """Return whether all ranks have memory for the exact gather; if not, it is not tried any more."""
        full = self._codes and not all(chunk.has_room() for chunk in self._chunks)
        (somewhere,) = self._reduced([full], dist.ReduceOp.MAX)
        if somewhere:
            self._codes = False
            if self._session.ledger.announces:
                logger.info("megatron-loco: no turns of the exact weight gather: memory is short")
        return self._codes

    def _look_again(self, kept: Kept) -> None:
        sent, weights = self._reduced(self._coded(), dist.ReduceOp.SUM)
        bits = 8 * sent / weights if weights else kept.bits
        spent = kept.spent + (0 if kept.weights else BLOCK)
        self._keep(Kept(kept.weights, kept.bits, spent))
        if not kept.bits / 2 < bits < kept.bits * 2:
            longest = MOST * BLOCK * 4
            if spent + longest <= SHARE * self._session.ledger.steps_seen:
                self._begin()

    def _begin(self) -> None:
        low = [False, True] if self._asked and self._config.compresses else [True]
        exact = [False, True] if self._codes else [False]
        self._choices = [Choice(gradients, weights) for gradients in low for weights in exact]
        turns = range(len(self._choices))
        self._order = [*turns, *reversed(turns)]
        self._logs: list[list[float]] = []
        """For each round, the logarithms of the choices' seconds a step."""
        self._rounds = 0
        self._sent = [0.0] * len(turns)
        self._messages = [0.0, 0.0]
        if len(turns) == 1:
            self._end(None)
            return
        self._next_round()

    def _next_round(self) -> None:
        self._choose(self._choices[0])
        self._out: set[int] = set()
        """The steps of this round that do not count, since the job did something else before they ended."""
        for chunk in self._chunks:
            chunk.session.disturbed = False
        self._marks = [self._now()]

    # --- within a round ----------------------------------------------------------------------------------

    def _choose(self, choice: Choice) -> None:
        for chunk in self._chunks:
            chunk.session.choice, chunk.session.disturbed = choice, False

    def _keep(self, kept: Kept) -> None:
        """Continue with the weight gather that was decided on."""
        for chunk in self._chunks:
            chunk.session.kept = kept
        self._choose(Choice(weights=kept.weights))

    def _now(self) -> Any:
        if self._session.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count(self, place: int) -> None:
        self._sent[place] += sum(chunk.sent() for chunk in self._chunks)
        if self._choices[place].weights:
            self._messages = [a + b for a, b in zip(self._messages, self._coded(), strict=True)]

    def _coded(self) -> list[float]:
        return [sum(numbers) for numbers in zip(*(chunk.coded() for chunk in self._chunks), strict=True)]

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        """Return the sums or maxima of `values` over all ranks, which all call it."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._session.device)
        for group in self._groups:
            dist.all_reduce(tensor, op=how, group=group)
        found: list[float] = tensor.tolist()
        return found

    def _seconds(self) -> list[float]:
        """Return the seconds of the round's steps on their slowest ranks, infinity for those left out."""
        pairs = list(zip(self._marks[:-1], self._marks[1:], strict=True))
        if self._session.device.type == "cuda":
            self._marks[-1].synchronize()
            seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        else:
            seconds = [end - start for start, end in pairs]
        seconds = [math.inf if step in self._out else taken for step, taken in enumerate(seconds)]
        return self._reduced(seconds, dist.ReduceOp.MAX)

    def _end_round(self) -> None:
        counted = self._seconds()[BLOCK - 1 :: BLOCK]
        of_choices = [[counted[turn], counted[-1 - turn]] for turn in range(len(self._choices))]
        finite = [[seconds for seconds in both if seconds < math.inf] for both in of_choices]
        if all(finite):
            self._logs.append([math.log(statistics.fmean(seconds)) for seconds in finite])
        self._rounds += 1
        decision = self._decision() if self._leads else 0
        (decided,) = self._reduced([decision], dist.ReduceOp.MAX)
        if decided:
            self._end(decided == _EXACT)
        else:
            self._next_round()

    def _decision(self) -> int:
        """Return whether the trial ends, and which gather of weights it decides for."""
        steps = BLOCK * len(self._order)
        most = max(self._config.trial // steps, 1) if self._asked else MOST
        if not self._codes:
            return _STOCK if self._rounds >= most else _GO_ON
        mean, low, high = 0.0, -math.inf, math.inf
        if len(self._logs) > 1:
            mean, low, high = self._difference(Choice(), Choice(weights=True))
        enough = high - low < max(NARROW, abs(mean)) and len(self._logs) >= FEWEST
        if self._rounds < most and (self._asked or not enough):
            return _GO_ON
        return _EXACT if mean < math.log(1 - WORTH) else _STOCK

    @property
    def _asked(self) -> bool:
        return bool(self._config.trial) and self.table is None

    def _difference(self, before: Choice, after: Choice) -> tuple[float, float, float]:
        """Return the mean of log(step of `after` / step of `before`) over rounds, and its 95 % interval."""
        places = [self._choices.index(choice) for choice in (before, after)]
        differences = [logs[places[1]] - logs[places[0]] for logs in self._logs]
        mean, rounds = statistics.fmean(differences), len(differences)
        half = statistics.stdev(differences) / math.sqrt(rounds) * _student(rounds - 1)
        return mean, mean - half, mean + half

    # --- the end of a trial ------------------------------------------------------------------------------

    def _end(self, exact: bool | None) -> None:
        """End the trial with a decision on the weight gather; None if there was nothing to try."""
        self._marks = []
        asked, steps = self._asked, self._rounds * BLOCK * len(self._order)
        if asked:
            self.table = Table(self._session.ledger.steps_seen, steps, self._rows())
            self._tell(self.table)
        if self._config.weight_gather == AUTO and exact is not None:
            sent, weights = self._reduced(self._messages, dist.ReduceOp.SUM)
            spent = self._session.kept.spent if self._session.kept is not None else 0
            self._keep(Kept(exact, 8 * sent / weights if weights else 0.0, spent + steps))
            self._tell_gather(exact, steps)
        else:
            self._choose(Choice(weights=self._config.codes_weights))

    def _rows(self) -> list[Row]:
        ranks = math.prod(group.size() for group in self._groups)
        sent = self._reduced(self._sent, dist.ReduceOp.SUM)
        rows = []
        for place, choice in enumerate(self._choices if len(self._logs) > 1 else ()):
            megabytes = sent[place] / ranks / (2 * self._rounds * (BLOCK - 1)) / 1e6
            percents: list[float] = []
            if place:
                percents = [100 * math.expm1(end) for end in self._difference(self._choices[0], choice)]
            seconds = math.exp(statistics.fmean(logs[place] for logs in self._logs))
            rows.append(Row(self._name(choice), seconds, megabytes, *percents))
        return rows

    def _name(self, choice: Choice) -> str:
        low = f"{self._config.bits}-bit gradients" * (self._config.compresses and choice.gradients)
        return ", ".join(filter(None, [low, "exact gather" * choice.weights])) or self._stock

    def _tell(self, table: Table) -> None:
        if not self._session.ledger.announces:
            return
        logger.info("megatron-loco: trial of %d steps, in turns, up to step %d:", table.steps, table.step)
        for row in table.rows:
            logger.info("megatron-loco:   %s", row)
        if not table.rows:
            logger.info(
                "megatron-loco:   nothing to compare: no weights are coded, or no round was left alone"
            )

    def _tell_gather(self, exact: bool, steps: int) -> None:
        if not self._session.ledger.announces:
            return
        found = "no round was left alone"
        if len(self._logs) > 1:
            ends = self._difference(Choice(), Choice(weights=True))
            mean, low, high = (100 * math.expm1(end) for end in ends)
            found = f"a step with the exact gather takes {mean:+.1f} % ({low:+.1f} to {high:+.1f})"
        logger.info(
            "megatron-loco: weight_gather auto: %s; %s, after %d steps in turns",
            "exact" if exact else "stock",
            found,
            steps,
        )


_GO_ON, _STOCK, _EXACT = range(3)
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, by Cornish and Fisher's expansion."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1)) if freedom > 1 else 12.71
