"""Turns within a run, on a clock that the test moves: when they begin, what they decide, what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.session import trial
from megatron_patch.session.session import Choice, Kept, Session
from megatron_patch.session.trial import Row, Trial

AUTO = CompressionConfig(method="none", weight_gather="auto")
LOW = {"method": "loco", "bits": 4, "start_step": 0}


class Job:
    """A job on one rank, whose steps take what `seconds` says for a choice and a step's number."""

    def __init__(
        self,
        config: CompressionConfig,
        seconds: Callable[[Choice, int], float],
        codes: bool | None = True,
        bits: float = 2.0,
        room: bool = True,
    ) -> None:
        self.session = Session(config, torch.device("cpu"))
        self.session.ledger._together.started = True
        self._seconds, self.bits, self.clock, self.step = seconds, bits, 0.0, 0
        self._room = room
        self.turns = Trial([self], [], codes)
        self.turns._now = lambda: self.clock  # type: ignore[method-assign]
        self.choices: list[Choice] = []

    def sent(self) -> float:
        low = self.session.active
        return (4e6 if low else 16e6) + (self.bits * 1e6 if self.session.choice.weights else 16e6)

    def has_room(self) -> bool:
        return self._room

    def coded(self) -> tuple[float, float]:
        return (self.bits * 1e6, 8e6) if self.session.choice.weights else (0.0, 0.0)

    def run(self, steps: int, around: Callable[[int], None] = lambda step: None) -> Job:
        for _ in range(steps):
            self.step += 1
            self.session.ledger.steps_seen = self.step
            self.choices.append(self.session.choice)
            self.clock += self._seconds(self.session.choice, self.step)
            around(self.step)
            self.turns.step_ended()
        return self

    @property
    def exact_steps(self) -> int:
        return sum(choice.weights for choice in self.choices)


def noisy(gain: float, noise: float, seed: int) -> Callable[[Choice, int], float]:
    """Steps of about a second, of which the exact gather saves the part `gain`, with relative `noise`."""
    dice = random.Random(seed)
    return lambda choice, step: (1 - gain * choice.weights) * dice.lognormvariate(0, noise)


@pytest.mark.parametrize(
    ("gain", "exact"), [(0.3, True), (0.1, True), (-0.1, False), (-0.3, False), (0.0, False)]
)
def test_the_faster_gather_is_kept(gain: float, exact: bool) -> None:
    """With steps that all take the same, after the fewest rounds; the run has begun with Megatron's own."""
    job = Job(AUTO, lambda choice, step: 1 - gain * choice.weights).run(trial.FIRST + 24)
    assert job.session.kept == Kept(exact, bits=2.0, spent=trial.FEWEST * 4 * trial.BLOCK)
    assert job.session.choice == Choice(weights=exact)
    assert job.exact_steps == 12
    assert not any(choice.weights for choice in job.choices[: trial.FIRST])


def test_where_steps_differ_by_a_tenth_by_themselves_a_clear_gain_is_found() -> None:
    """A gain of a fifth, a loss of a tenth, and neither, in 200 jobs each."""
    kept = {
        gain: sum(
            Job(AUTO, noisy(gain, 0.1, seed)).run(trial.FIRST + trial.MOST * 8).session.choice.weights
            for seed in range(200)
        )
        for gain in (0.2, -0.1, 0.0)
    }
    assert kept[0.2] >= 196
    assert kept[-0.1] <= 10
    assert kept[0.0] < 120  # It costs nothing, whichever is kept.


def test_a_block_s_first_step_and_disturbed_steps_do_not_count() -> None:
    """In 12 rounds, every block's first step takes long, and the job evaluates after some other steps."""
    turn: list[Choice] = []

    def seconds(choice: Choice, step: int) -> float:
        first = not turn or turn[-1] != choice
        turn.append(choice)
        return 50.0 if first else (1.0 if choice.weights else 1.2) + (99 if step % 7 == 0 else 0)

    def around(step: int) -> None:
        job.session.disturbed |= step % 7 == 0

    job = Job(AUTO, seconds)
    job.run(trial.FIRST + 24, around)
    assert job.session.kept is not None
    assert job.session.kept.weights


def test_it_waits_until_compression_has_started() -> None:
    job = Job(CompressionConfig(weight_gather="auto", **LOW), lambda choice, step: 1.0)
    job.session.ledger._together.started = False
    assert job.run(95).exact_steps == 0
    job.session.ledger._together.started = True
    assert job.run(40).session.kept is not None
    assert all(choice.gradients for choice in job.choices)


@pytest.mark.parametrize("gain", [0.3, -0.3])
def test_it_is_tried_again_when_the_bits_have_doubled_and_steps_allow_it(gain: float) -> None:
    """What is faster changes with the bits; all turns together take less than half a percent of the steps."""
    job = Job(AUTO, lambda choice, step: 1 + (gain if job.bits > 3 else -gain) * choice.weights)
    job.run(50_010)
    before = job.session.choice
    assert before == Choice(weights=gain > 0)
    assert job.session.kept is not None
    assert job.session.kept.spent < 0.005 * job.step
    assert before.weights or job.exact_steps < 0.005 * job.step
    job.bits = 5.0
    job.run(trial.AGAIN + 200)
    assert job.session.choice == Choice(weights=not before.weights)
    assert job.session.kept.spent < 0.005 * job.step


def test_there_is_no_second_trial_in_a_short_job() -> None:
    job = Job(AUTO, lambda choice, step: 1.0).run(200)
    job.bits = 9.0
    spent = job.exact_steps
    job.run(10_000)
    assert job.exact_steps - spent <= 10 * trial.BLOCK  # It has looked ten times.


@pytest.mark.parametrize(
    "options", [{"codes": False}, {"codes": None}, {"room": False}], ids=["no-weights", "must-not", "no-room"]
)
def test_where_the_exact_gather_cannot_be_tried_there_are_no_turns(options: dict[str, Any]) -> None:
    job = Job(AUTO, lambda choice, step: 1.0, **options).run(300)
    assert job.exact_steps == 0
    assert job.session.kept is None


def test_the_table_of_a_trial() -> None:
    """Four choices; the run goes on as configured, whatever the table says."""
    config = CompressionConfig(weight_gather="exact", trial=96, **LOW)
    job = Job(config, lambda c, step: 2.0 + 0.02 * (step % 3) - 0.4 * c.gradients + 0.2 * c.weights)
    job.run(trial.FIRST + 96 + 5)
    table = job.turns.table
    assert table is not None
    assert (table.step, table.steps) == (trial.FIRST + 96, 96)
    names = ["stock, fp32 gradients", "exact gather", "4-bit gradients", "4-bit gradients, exact gather"]
    assert [row.choice for row in table.rows] == names
    stock, exact, low, both = table.rows
    assert [row.verdict for row in table.rows] == ["", "switch it off", "keep it", "keep it"]
    assert stock.percent is None
    assert exact.percent == pytest.approx(10, abs=2)
    assert low.percent == pytest.approx(-20, abs=2)
    assert both.percent == pytest.approx(-10, abs=2)
    assert [row.megabytes for row in table.rows] == pytest.approx([32, 18, 20, 6])
    assert job.session.choice == Choice(weights=True)
    assert len(set(job.choices[: trial.FIRST])) == 1
    assert str(low).split("MB a rank")[1].startswith(f"   {low.percent:+.1f} % ({low.low:+.1f} to")


def test_a_trial_decides_on_the_gather_too_and_gradients_take_turns_but_once() -> None:
    config = CompressionConfig(weight_gather="auto", trial=48, **LOW)
    job = Job(config, lambda c, step: 2.0 - 0.4 * c.gradients - 0.2 * c.weights).run(trial.FIRST + 48)
    assert job.session.kept == Kept(True, bits=2.0, spent=48)
    job.bits = 9.0
    job.run(50_000)
    assert job.session.kept.spent > 48, "it was tried again"
    assert all(choice.gradients for choice in job.choices[trial.FIRST + 48 :])


@pytest.mark.parametrize(
    ("room", "codes", "exact"), [(True, True, True), (False, True, False), (True, None, False)]
)
def test_a_resumed_job_keeps_the_exact_gather_only_where_it_may_be_tried(
    room: bool, codes: bool | None, exact: bool
) -> None:
    """It begins with Megatron's own, and asks all ranks at the end of the first step."""
    job = Job(AUTO, lambda choice, step: 1.0, codes=codes, room=room)
    job.session.kept = Kept(True, bits=2.0, spent=24)
    job.run(300)
    assert [choice.weights for choice in job.choices] == [False] + [exact] * 299


def test_memory_that_has_become_short_ends_the_looks() -> None:
    job = Job(AUTO, lambda choice, step: 1 + 0.3 * choice.weights).run(200)
    job._room = False
    before = job.exact_steps
    job.run(3 * trial.AGAIN)
    assert job.exact_steps == before


def test_a_resumed_job_that_asks_for_the_exact_gather_takes_no_turns() -> None:
    """Whatever a run with auto had decided."""
    job = Job(CompressionConfig(method="none", weight_gather="exact"), lambda choice, step: 1.0)
    job.session.kept = Kept(False, bits=0.1, spent=24)
    job.run(60_000)
    assert job.exact_steps == 60_000


@pytest.mark.parametrize("freedom", [2, 3, 5, 11, 40])
def test_student_s_quantile(freedom: int) -> None:
    exact = {2: 4.303, 3: 3.182, 5: 2.571, 11: 2.201, 40: 2.021}
    assert trial._student(freedom) == pytest.approx(exact[freedom], rel=0.04)


@pytest.mark.parametrize(
    ("low", "high", "says"), [(-3, -1, "keep it"), (1, 2, "switch it off"), (-1, 2, "no difference found")]
)
def test_the_verdict_is_the_interval_s(low: float, high: float, says: str) -> None:
    assert Row("exact gather", 1.0, 1.0, (low + high) / 2, low, high).verdict == says


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trial": 47}, "0, or a whole number of steps, 48 or more"),
        ({"trial": 48, "method": "onebit_adam"}, "take no turns"),
        ({"trial": 48, "outer_interval": 4}, "take no turns"),
        ({"trial_only": True}, "false without a trial"),
    ],
)
def test_trials_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        CompressionConfig(**options)
