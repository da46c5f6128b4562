"""The ledger's answers: all pairs of events in every state, several optimizers, dropped gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patch.config import CompressionConfig
from megatron_patch.session import onset
from megatron_patch.session.steps import Answer, Ledger, State

CPU = torch.device("cpu")


class Optimizer:
    """Something that a ledger may refer to weakly."""


class Model:
    """A ledger, two parameters, and an optimizer for each."""

    def __init__(self, **options: Any) -> None:
        self.parameters = [torch.zeros(2), torch.zeros(2)]
        self.there = True
        config = CompressionConfig(**{"start_step": 0, "reset_interval": 0} | options)
        self.ledger = Ledger(config, [], CPU, lambda: self.parameters)
        self.optimizers = [Optimizer(), Optimizer()]

    def exchange(self, rerun: bool = False) -> Answer:
        answer, agrees = self.ledger.exchange("part", rerun)
        assert agrees
        return answer

    def prepare(self) -> Answer:
        self.ledger.prepare(2.0)
        return Answer.NOTHING

    def step(self, number: int = 0, successful: bool = True) -> Answer:
        mine = [self.parameters[number]]
        if successful:
            mine[0].add_(1)
        return self.ledger.step([self.optimizers[number]], successful, 1.0, [1e-3], mine)

    def clear_one(self, number: int) -> Answer:
        self.parameters[number].grad = torch.ones(2)
        return self.ledger.clear([self.parameters[number]])

    def clear(self, changed: bool = False) -> Answer:
        for parameter in self.parameters if changed else ():
            parameter.mul_(1)
        return self.ledger.clear()


EVENTS: dict[str, Callable[[Model], Answer]] = {
    "exchange": Model.exchange,
    "rerun": lambda model: model.exchange(rerun=True),
    "prepare": Model.prepare,
    "step": Model.step,
    "skipped": lambda model: model.step(successful=False),
    "clear": Model.clear,
    "changed, clear": lambda model: model.clear(changed=True),
    "skip": lambda model: model.ledger.skip(),
}
N, END, SKIP = Answer.NOTHING, Answer.ENDED, Answer.SKIPPED
UNUSED = {
    "exchange": (Answer.REPEATED, State.EXCHANGED),
    "rerun": (Answer.REPLAYED, State.EXCHANGED),
    "prepare": (N, State.PREPARED),
    "step": (END, State.IDLE),
    "skipped": (SKIP, State.IDLE),
    "clear": (SKIP, State.IDLE),
    "changed, clear": (N, State.EXCHANGED),
    "skip": (SKIP, State.IDLE),
}
TABLE = {
    State.IDLE: {
        "exchange": (N, State.EXCHANGED),
        "rerun": (N, State.EXCHANGED),
        "step": (END, State.IDLE),
        "skipped": (SKIP, State.IDLE),
        **dict.fromkeys(("prepare", "clear", "changed, clear", "skip"), (N, State.IDLE)),
    },
    State.EXCHANGED: UNUSED,
    State.PREPARED: UNUSED
    | dict.fromkeys(("exchange", "rerun"), (SKIP, State.EXCHANGED))
    | {"changed, clear": (N, State.PREPARED)},
}


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("second", EVENTS)
def test_all_pairs_of_events(start: State, first: str, second: str) -> None:
    model = Model()
    model.exchange()
    model.step()
    if start is not State.IDLE:
        model.exchange()
    if start is State.PREPARED:
        model.prepare()
    ledger, before = model.ledger, (model.ledger.steps, model.ledger.steps_seen)
    state, answers, changed = start, [], False
    for event in (first, second):
        assert ledger.state is state
        # Gradients that something has used are not dropped when they are cleared, now or later.
        expected, state = TABLE[state]["changed, clear" if event == "clear" and changed else event]
        changed = event == "changed, clear"
        answers.append(expected)
        assert EVENTS[event](model) is expected, event
    assert ledger.state is state
    assert ledger.steps == before[0] + answers.count(END)
    assert ledger.steps_seen == before[1] + answers.count(END) + answers.count(SKIP)
    assert ledger.events.skipped_steps == answers.count(SKIP)
    assert ledger.events.replays == answers.count(Answer.REPLAYED)
    assert ledger.events.repeated_exchanges == answers.count(Answer.REPEATED)


def test_the_loss_scale_of_both_halves_and_of_the_first_optimizer_counts() -> None:
    model = Model()
    model.exchange()
    model.prepare()
    model.ledger.step([model.optimizers[0]], True, 3.0, [1e-3])
    assert model.ledger.factor == 6.0
    assert model.ledger.step([model.optimizers[1]], True, 7.0, [1e-3]) is Answer.JOINED
    assert model.ledger.factor == 6.0


def test_two_optimizers_make_one_step_in_any_order_and_at_unlike_intervals() -> None:
    model = Model()
    for number in range(12):
        model.exchange()
        turn = [0, 1] if number % 3 else [number % 2]
        answers = [model.step(which) for which in turn]
        assert answers == [Answer.ENDED, Answer.JOINED][: len(turn)]
        for which in turn:
            assert model.clear_one(which) is Answer.NOTHING
    assert model.ledger.steps == model.ledger.steps_seen == 12
    assert model.ledger.events.skipped_steps == 0
    assert len(model.ledger.onset.rates) == 2


def test_one_of_two_optimizers_drops_its_gradients() -> None:
    model = Model()
    model.exchange()
    assert [model.step(0), model.step(1)] == [Answer.ENDED, Answer.JOINED]
    model.exchange()
    assert model.step(0) is Answer.ENDED
    assert model.ledger.clear() is Answer.FORGET  # The second one's; the step has ended.
    model.exchange()
    assert model.clear_one(1) is Answer.FORGET  # Before the first one steps.
    assert model.step(0) is Answer.ENDED
    model.exchange()
    assert [model.clear_one(which) for which in (0, 1)] == [Answer.FORGET, Answer.SKIPPED]
    model.exchange()
    assert [model.step(0, successful=False), model.step(1)] == [Answer.SKIPPED, Answer.JOINED]
    model.exchange()
    assert [model.step(0), model.step(1, successful=False)] == [Answer.ENDED, Answer.FORGET]
    assert model.ledger.events.skipped_steps == 5
    assert (model.ledger.steps, model.ledger.steps_seen) == (4, 6)


def test_blocks_with_an_optimizer_each_that_are_trained_in_turns_drop_nothing() -> None:
    model = Model()
    for number in range(6):
        trained = number % 2
        model.exchange()
        model.parameters[trained].grad, model.parameters[1 - trained].grad = torch.ones(2), None
        model.step(trained)
        assert model.ledger.clear(model.parameters) is Answer.NOTHING
    assert model.ledger.events.skipped_steps == 0


def test_gradients_that_a_step_has_used_may_be_cleared_at_any_time() -> None:
    """An actor and its critic in one model, each of which clears its gradients before its own pass."""
    model = Model()
    for number in range(6):
        mine = model.parameters[number % 2]
        assert model.ledger.clear([mine]) is Answer.NOTHING
        mine.grad = None
        model.exchange()
        mine.grad = torch.ones(2)
        assert model.step(number % 2) is Answer.ENDED
    assert model.ledger.events.skipped_steps == 0


def test_clearing_some_of_an_optimizer_s_gradients_drops_no_step() -> None:
    model = Model()
    for number in range(3):
        model.exchange()
        for parameter in model.parameters:
            parameter.grad = torch.ones(2)
        if number:
            assert model.ledger.clear(model.parameters[:1]) is Answer.NOTHING
            model.parameters[0].grad = None
        assert model.ledger.step([model.optimizers[0]], True, 1.0, [1e-3], model.parameters) is Answer.ENDED
    assert model.ledger.events.skipped_steps == 0


def test_an_optimizer_that_steps_no_more_is_forgotten_after_two_steps() -> None:
    """A first phase's optimizer is still there, and so are gradients of its parameters."""
    model, answers = Model(), []
    model.exchange()
    model.step(0)
    for _ in range(5):
        model.exchange()
        for parameter in model.parameters:
            parameter.grad = torch.ones(2)
        model.step(1)
        answers.append(model.ledger.clear(model.parameters))
    assert answers == [Answer.FORGET] * 2 + [Answer.NOTHING] * 3
    model.exchange()
    assert model.step(0) is Answer.ENDED


def test_steps_of_fused_optimizers_are_changes() -> None:
    """They do not change versions; another optimizer of the same parameters has nothing to drop."""
    model = Model()
    mine = model.parameters
    for number in range(6):
        model.exchange()
        for parameter in mine:
            parameter.grad = torch.ones(2)
        which = int(number > 2)  # A second one takes over.
        assert model.ledger.step([model.optimizers[which]], True, 1.0, [1e-3], mine) is Answer.ENDED
        assert model.ledger.clear(mine) is Answer.NOTHING


def test_drops_of_first_gradients_that_are_far_apart_set_nothing_aside() -> None:
    """A loop that accumulates two passes, and twice drops what the first of them left."""
    model = Model()
    for number in range(12):
        model.exchange()
        assert not model.ledger.sets_aside
        if number in (3, 9):
            assert model.clear() is Answer.SKIPPED
            model.exchange()
        model.exchange()
        assert model.step() is Answer.ENDED


def test_a_pass_may_begin_with_another_part() -> None:
    """Two heads in turns, before a trunk."""
    model = Model()
    for number in range(6):
        for part in (number % 2, "trunk"):
            assert model.ledger.exchange(part)[0] is Answer.NOTHING
        model.step()
    assert model.ledger.events.repeated_exchanges == 0


def test_another_model_that_clears_its_gradients_ends_no_step() -> None:
    model = Model()
    for _ in range(4):
        model.exchange()
        assert model.ledger.clear([torch.zeros(2)]) is Answer.NOTHING
    assert model.ledger.steps == 0
    assert model.ledger.events.repeated_exchanges == 3


def test_an_optimizer_that_is_gone_waits_for_nothing_and_its_place_is_taken() -> None:
    model = Model()
    for _ in range(5):
        model.exchange()
        model.optimizers[0] = Optimizer()
        assert model.step() is Answer.ENDED
        model.exchange()
        assert model.step() is Answer.ENDED
    assert len(model.ledger.onset.rates) == 1


def test_what_a_loop_drops_after_every_step_leaves_errors_alone() -> None:
    """A discriminator's gradients from its generator's pass, five times."""
    model, answers = Model(), []
    for _ in range(5):
        model.exchange()
        aside = model.ledger.sets_aside
        within = model.ledger.within_step
        answers.append((aside, within, model.clear()))
        model.exchange()
        assert not model.ledger.sets_aside
        assert model.step() is Answer.ENDED
    before = Answer.NOTHING  # Until an optimizer has been seen nothing is known to be dropped.
    assert answers[0] == (False, True, before)
    assert answers[1:3] == [(False, True, Answer.SKIPPED)] * 2
    assert answers[3:] == [(True, False, Answer.NOTHING)] * 2
    assert (model.ledger.steps, model.ledger.events.skipped_steps) == (5, 2)
    model.exchange()
    assert model.ledger.sets_aside
    model.step()  # It was no such pass.
    model.exchange()
    assert not model.ledger.sets_aside


def test_gradients_that_are_nowhere_were_cleared() -> None:
    model = Model()
    model.ledger._there = lambda: model.there
    model.exchange()
    model.step()
    model.exchange()
    model.there = False
    assert not model.ledger.within_step
    assert model.exchange() is Answer.SKIPPED


def test_exchanges_are_steps_until_an_optimizer_is_seen() -> None:
    model = Model(start_step="auto")
    for number in range(5):
        model.exchange()
        assert model.ledger.steps == number
        assert (model.clear() if number % 2 else model.clear(changed=True)) is Answer.NOTHING
    assert model.ledger.settle() is Answer.ENDED
    assert model.ledger.steps == 5
    model.exchange()
    assert model.exchange() is Answer.REPEATED, "gradients are still there"
    assert model.step() is Answer.ENDED
    assert model.ledger.steps == model.ledger.steps_seen == 1
    assert not model.ledger.onset.started


def test_every_part_may_begin_a_pass() -> None:
    """Blocks that are trained in turns: ranks ask at the same part, whichever steps they see."""
    seeing, other = Model(start_step="auto").ledger, Model(start_step="auto").ledger
    optimizer, asked = Optimizer(), []
    for part in [0, 0, 0, 1, 1, 2, 2, 2, 0, 1]:
        asked.append(tuple(ledger.exchange(part)[1] for ledger in (seeing, other)))
        seeing.step([optimizer], True, 1.0, [1e-3])
    assert all(mine == theirs for mine, theirs in asked)
    assert [mine for mine, _ in asked] == [True, True, True, False, True, False, True, True, False, False]


def test_one_bit_adam_waits_for_no_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="megatron_patch"):
        for method, words in (("onebit_adam", 0), ("none", 0), ("loco", 1)):
            ledger, optimizer = Model(method=method, start_step="auto").ledger, Optimizer()
            ledger.announces = True
            caplog.clear()
            for number in range(2001):
                ledger.step([optimizer], True, 1.0, [1e-6 * number])
            assert len(caplog.records) == words


def waits(start: int | str, rates: list[float]) -> tuple[list[int], list[int]]:
    """In a worker: the passes that waited for their own answers, and those that were compressed."""
    ledger = Ledger(CompressionConfig(start_step=start), [dist.group.WORLD], CPU)
    made, waited, compressed = [], [], []

    class Answers(onset._Answers):
        def __init__(self, answers: torch.Tensor) -> None:
            made.append(self)
            super().__init__(answers)

        def read(self) -> list[int]:
            if made[-1] is self:
                waited.append(len(made) - 1)
            return super().read()

    before, onset._Answers = onset._Answers, Answers
    optimizer = type("Named", (SimpleNamespace,), {"__hash__": object.__hash__})(param_groups=[{}])
    for number, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate  # As a scheduler leaves it after the step before.
        ledger.exchange("part")
        ledger.agree()
        if ledger.active:
            compressed.append(number)
        if number != 3:  # A step that is skipped.
            ledger.step([optimizer], True, 1.0, [rate])
        else:
            ledger.step([optimizer], False, 1.0, [rate])
    onset._Answers = before
    return waited, compressed


def test_no_pass_waits_while_no_rank_can_start(pool: Any) -> None:
    """Answers of a pass are read in the next one, but where compression may begin."""
    rising = [1e-4 * step for step in range(1, 13)] + [1.2e-3] * 4
    assert pool.run(waits, "auto", rising, world_size=2) == [([0, 13], [13, 14, 15])] * 2
    assert pool.run(waits, 6, [1e-3] * 10, world_size=2) == [([0, 7], [7, 8, 9])] * 2
