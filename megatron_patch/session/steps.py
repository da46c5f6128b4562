"""The ledger of one model: what the training loop has done with the gradients that were exchanged.

The code that attached the model reports events, and the ledger answers what each means for the error states.
Nothing else decides whether a step of the model has ended, whether it was skipped, and whether compression
has started. A *pass* is one backward pass in which gradients are exchanged.

    event                        IDLE                EXCHANGED                         PREPARED
    exchange, first of a pass    nothing             REPEATED; REPLAYED in a rerun;    SKIPPED
                                                     an unseen step: see below
    prepare                      nothing             nothing, then PREPARED            nothing
    step, weights were updated   ENDED or RESET;     ENDED or RESET                    ENDED or RESET
                                 JOINED to the
                                 step of another
    step, skipped                SKIPPED; FORGET     SKIPPED                           SKIPPED
                                 after another's
    clear                        FORGET where an     SKIPPED; FORGET where another     as EXCHANGED
                                 optimizer waits     optimizer still waits
    skip                         nothing             SKIPPED                           SKIPPED

The state is EXCHANGED from a pass until an optimizer uses its gradients or the loop clears them, and IDLE
otherwise. An optimizer *waits* while gradients of its parameters were exchanged that it has not used.

Clearing means that gradients are dropped, unless parameters have changed since the pass: then something has
used them, such as the first half of a sharpness-aware step, or LBFGS's line search. Until the first step of
an optimizer is seen, a pass that finds the last gradients cleared, or parameters changed, counts as the step
after it (`_UNSEEN` such steps are worth a line in the log), which is undone when an optimizer is seen.

A loop that drops the first gradients after every step, as a GAN drops those that its generator's pass leaves
at the discriminator, goes on doing so: after two drops in a row such a pass leaves errors alone
(`sets_aside`), and clearing its gradients then means nothing.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from megatron_patch.config import CompressionConfig
from megatron_patch.session.onset import LONG, Onset, Phase, StartTogether
from megatron_patch.session.torch_steps import learning_rates


@dataclass
class Events:
    """Counts of events that affect the errors."""

    resets: int = 0
    """Resets of all errors, e <- 0, every `reset_interval` steps after compression has started."""
    skipped_steps: int = 0
    """Steps that the optimizer skipped (fp16 overflow). Their exchanges must not count, so e <- 0."""
    replays: int = 0
    """Backward passes that Megatron's rerun state machine ran again within an optimizer step; e <- 0."""
    repeated_exchanges: int = 0
    """Further exchanges within one optimizer step, which are the loop's design; errors are kept."""
    uncompressed_syncs: int = 0
    """Exchanges of a whole bucket group without compression (force_all_reduce, before start_step)."""


logger = logging.getLogger(__name__)

_UNSEEN = 20


class State(enum.Enum):
    """What has become of the gradients that were exchanged last."""

    IDLE = enum.auto()
    """No optimizer will use them: a step has, or the loop has dropped them."""
    EXCHANGED = enum.auto()
    """They are there, and no optimizer has used them."""
    PREPARED = enum.auto()
    """An optimizer has made the first half of a step with them."""


class Answer(enum.Enum):
    """What an event means."""

    NOTHING = enum.auto()
    ENDED = enum.auto()
    """A step of the model has ended, and has updated weights."""
    RESET = enum.auto()
    """As ENDED, and `reset_interval` divides the number of steps: e <- 0."""
    SKIPPED = enum.auto()
    """A step has ended that used no gradients: e <- 0."""
    JOINED = enum.auto()
    """This optimizer's step is part of the step that another optimizer has ended."""
    FORGET = enum.auto()
    """One of several optimizers did not use its gradients: e <- 0. No step ends."""
    REPEATED = enum.auto()
    """Gradients are exchanged again within a step: e stays, and the next exchange sends it."""
    REPLAYED = enum.auto()
    """Megatron's rerun state machine runs the pass again: e <- 0, and the last exchange does not count."""

    @property
    def ends(self) -> bool:
        """Whether a step of the model has ended."""
        return self in (Answer.ENDED, Answer.RESET, Answer.SKIPPED)


class Counts(NamedTuple):
    """What a model that is attached again goes on with."""

    steps: int
    steps_seen: int
    started: bool


class _Optimizer:
    """An optimizer of the model, or several that always step together, held weakly."""

    def __init__(self, parts: list[ref[Any]], waits: bool) -> None:
        self.parts = parts
        self.parameters: Sequence[torch.Tensor] = ()
        self.waits = waits
        self.dropped = 0
        """How many times in a row it has dropped its gradients in another optimizer's step."""
        self._used: dict[int, tuple[ref[torch.Tensor], int]] = {}
        """The gradients, with their versions, that its last step has left, by their parameters' ids."""

    def step(self, parameters: Sequence[torch.Tensor], beside_others: bool) -> None:
        self.parameters, self.waits, self.dropped = parameters, False, 0
        self._used = {
            id(p): (ref(p.grad), p.grad._version)
            for p in (parameters if beside_others else ())
            if p.grad is not None
        }

    def drops(self, cleared: set[int]) -> bool:
        """Whether clearing the gradients of `cleared` clears what this optimizer has not used, all of it."""
        left = [p for p in self.parameters if p.grad is not None and not self._has_used(p)]
        return bool(left) and all(id(p) in cleared for p in left)

    def _has_used(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        known, version = self._used.get(id(parameter), (None, 0))
        if gradient is None or known is None:
            return False
        return known() is gradient and gradient._version == version

    @property
    def alive(self) -> bool:
        return all(part() is not None for part in self.parts)

    @property
    def rates(self) -> list[float]:
        """The learning rates that are set now."""
        parts = (part() for part in self.parts)
        return [rate for part in parts for rate in learning_rates(part)]


class Ledger:
    """The ledger of one attached model on one rank.

    `steps` counts the optimizer steps that succeeded, `steps_seen` all of them; with `restart` they may come
    from a checkpoint. `factor` is the change of the loss scale in the step that has ended last.

    Args:
        config: the options.
        ranks: the process groups whose ranks exchange gradients with this one; they start together.
        device: the device of the gradients.
        parameters: returns the model's parameters, as optimizers update them.
        there: returns whether gradients are where an optimizer finds them, if clearing them cannot be
            observed, or None.
    """

    def __init__(
        self,
        config: CompressionConfig,
        ranks: Sequence[dist.ProcessGroup],
        device: torch.device,
        parameters: Callable[[], Iterable[torch.Tensor]] = tuple,
        there: Callable[[], bool] | None = None,
    ) -> None:
        self.config = config
        self.state = State.IDLE
        self.events = Events()
        self.steps = self.steps_seen = 0
        self.factor = 1.0
        self.onset = Onset.at(config, 0)
        self.phase = Phase()
        self.announces = False  # Set for the one ledger that logs for all parts of the model and all ranks.
        self._parameters = parameters
        self._there = there
        self._together = StartTogether(ranks, device)
        self._optimizers: list[_Optimizer] = []
        """In the order of their first steps; Onset.rates has the same order."""
        self._stepped: WeakSet[Any] = WeakSet()
        """The optimizers that have stepped since the last pass."""
        self._prepared = 1.0
        """The change of the loss scale while a step was prepared."""
        self._pass: set[object] = set()
        """The parts of the model that this pass has exchanged."""
        self._asked: set[object] = set()
        """The parts that were exchanged since ranks agreed last, the same on all ranks."""
        self._passes = 0
        """Passes since the last step."""
        self._versions: dict[int, int] = {}
        """The versions of parameters when the last pass began, by their ids."""
        self._cleared = self._partly = self._said = self._first_dropped = False
        self._dropped_first = 0
        """How many steps in a row dropped their first gradients; `_first_dropped`: whether this one has."""
        self.seen = False
        """Whether a step of an optimizer was ever seen."""
        self._unseen_steps = 0
        self._onset_before = self.onset
        """The onset before the first unseen step."""

    # --- what others ask ---------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the next exchange is compressed."""
        if self.config.is_onebit_adam:
            return self.phase.switch_step is not None and self.steps >= self.phase.switch_step
        return self.config.compresses and self._together.started

    @property
    def sends_momentum(self) -> bool:
        """Whether 1-bit Adam leaves gradients unreduced, because it exchanges momentum."""
        return self.config.is_onebit_adam and self.active

    @property
    def leaves_unreduced(self) -> bool:
        """Whether 1-bit Adam has left gradients unreduced that no optimizer has used yet."""
        return self.sends_momentum and self.state is not State.IDLE

    @property
    def hides_overflows(self) -> bool:
        """Whether an optimizer finds overflows by itself, on the device, and steps none the less."""
        parts = (part() for optimizer in self._optimizers for part in optimizer.parts)
        return any(getattr(part, "_step_supports_amp_scaling", False) for part in parts)

    @property
    def sets_aside(self) -> bool:
        """Whether this pass's gradients will be dropped, as they were the last two times."""
        return self._passes == 1 and self._dropped_first >= 2

    @property
    def within_step(self) -> bool:
        """Whether gradients were exchanged that an optimizer may still use."""
        waits = self.state is not State.IDLE and not self.sets_aside
        return waits and (self._there is None or self._there())

    def joins(self, optimizers: Iterable[object]) -> bool:
        """Whether a step of `optimizers` belongs to the step that another optimizer has ended."""
        return self.state is State.IDLE and bool(self._stepped) and self._stepped.isdisjoint(optimizers)

    # --- events ------------------------------------------------------------------------------------------

    def exchange(self, part: object, rerun: bool = False) -> tuple[Answer, bool]:
        """Note that a part of the model is about to be exchanged.

        Args:
            part: names the part; each pass exchanges it once, in the same order on all ranks.
            rerun: whether Megatron's rerun state machine runs this pass again.

        Returns:
            What it means, and whether ranks must agree now (`agree`): once a pass, at the same part on all
            ranks, whichever steps they see.
        """
        agrees = not self._asked or part in self._asked
        self._asked = {part} if agrees else self._asked | {part}
        if part not in self._pass and self.state is not State.IDLE:
            self._pass.add(part)
            return Answer.NOTHING, agrees
        self._pass = {part}
        answer = self._last_gradients(rerun)
        self.state = State.EXCHANGED
        self._cleared = False
        self._passes += 1
        self._versions = {id(parameter): parameter._version for parameter in self._parameters()}
        for optimizer in self._optimizers:
            optimizer.waits = True
        return answer, agrees

    def _last_gradients(self, rerun: bool) -> Answer:
        """Return what it means for the last gradients that a pass begins."""
        if self.state is State.PREPARED:  # The optimizer did not step, because another found an overflow.
            return self._end(False)
        if self.state is State.IDLE:
            return Answer.NOTHING
        if rerun:
            self.events.replays += 1
            return Answer.REPLAYED
        if self._there is not None and not self._there():
            answer = self.clear()
            if answer is not Answer.NOTHING:
                return answer
        if not self.seen and (self._cleared or self._changed(self._parameters())):
            return self.settle()
        self.events.repeated_exchanges += 1
        if self.events.repeated_exchanges == 1 and self.announces:
            logger.info(
                "megatron-loco: gradients are exchanged more than once in an optimizer step: what an "
                "exchange loses is added to the next one"
            )
        return Answer.REPEATED

    def settle(self) -> Answer:
        """Count the last pass as a step if no optimizer has ever been seen, as before a checkpoint."""
        if self.seen or self.state is State.IDLE:
            return Answer.NOTHING
        if self.sends_momentum:
            raise RuntimeError(
                "megatron-loco: onebit_adam left gradients unreduced, and no step of a Megatron optimizer "
                "has used them: step the optimizer that get_megatron_optimizer returns"
            )
        if not self._unseen_steps:
            self._onset_before = copy.deepcopy(self.onset)
        answer = self._end(True)
        self._unseen_steps += 1
        if self._unseen_steps == _UNSEEN and self.announces and self.config.compresses:
            logger.warning(
                "megatron-loco: no step of an optimizer was seen in %d exchanges: exchanges count as steps, "
                "and start_step auto takes the learning rate for a constant one",
                _UNSEEN,
            )
        return answer

    def prepare(self, factor: float = 1.0) -> None:
        """Note that an optimizer has prepared gradients, and has changed the loss scale by `factor`."""
        if self.state is not State.IDLE:
            self.state = State.PREPARED
            self._prepared *= factor

    def step(
        self,
        optimizers: Sequence[object],
        successful: bool = True,
        factor: float = 1.0,
        rates: Sequence[float] = (),
        parameters: Sequence[torch.Tensor] = (),
    ) -> Answer:
        """Note that `optimizers` have stepped together.

        A loop may step several optimizers of one model one by one: together they make one step of the model,
        which the first of them ends, and whose loss scale is that of the first.

        Args:
            optimizers: the optimizers, without the chained optimizer around them.
            successful: whether parameters were updated.
            factor: the factor by which fp16's loss scale has changed.
            rates: the learning rates of the parameter groups.
            parameters: the model's parameters that they update; none stands for all of them.
        """
        self.see()
        place = self._place_of(optimizers)
        alone = len(self._optimizers) == 1 and len(parameters) == len(self._versions)
        self._optimizers[place].step(parameters, beside_others=not alone)
        if successful:  # Fused optimizers do not change versions.
            self._versions |= dict.fromkeys(map(id, parameters) if parameters else self._versions, -1)
        if not self.joins(optimizers):
            self._stepped = WeakSet(optimizers)
            return self._end(successful, factor, rates, place)
        self._stepped.update(optimizers)
        if successful:
            self.onset.after_another(self.steps, rates, place)
            return Answer.JOINED
        self.events.skipped_steps += 1
        return Answer.FORGET

    def clear(
        self, parameters: Iterable[torch.Tensor] | None = None, optimizer: object | None = None
    ) -> Answer:
        """Note that the loop clears the gradients of some parameters, of all if None; of an optimizer's."""
        if not self.seen:
            mine = None if parameters is None else self.own(parameters)
            self._cleared |= self.state is not State.IDLE and mine != []
            if optimizer is None or not mine:
                return Answer.NOTHING
            self.see()
            self._optimizers[self._place_of([optimizer])].parameters = mine
        waiting = [known for known in self._optimizers if known.waits and known.alive]
        if not waiting:
            return Answer.NOTHING
        cleared = None if parameters is None else set(map(id, parameters))
        for known in waiting:
            if cleared is None or known.drops(cleared):
                known.waits = self._changed(known.parameters or self._parameters())
        left = sum(known.waits for known in waiting)
        if left == len(waiting):
            return Answer.NOTHING
        if self.sets_aside and not left and self.state is not State.IDLE:
            self.state, self._first_dropped = State.IDLE, True
            return Answer.NOTHING
        if self.announces and not self._said:
            self._said = True
            logger.info(
                "megatron-loco: gradients were cleared that no optimizer step has used (an overflow, a batch "
                "that is left out, another model's pass): errors start from zero; report() counts such steps"
            )
        if self.state is State.IDLE:  # Another optimizer's step has ended the step.
            return self._dropped_beside([known for known in waiting if not known.waits])
        if left:
            self._partly = True
            return Answer.FORGET
        if self._passes == 1:
            self._first_dropped, self._dropped_first = True, self._dropped_first + 1
        passes = self._passes
        answer = self._end(False)
        self._passes = passes
        return answer

    def _dropped_beside(self, optimizers: Sequence[_Optimizer]) -> Answer:
        """Return what it means that some optimizers drop gradients in another one's step."""
        for optimizer in optimizers:
            optimizer.dropped += 1
        if all(optimizer.dropped > 2 for optimizer in optimizers):  # They step no more.
            return Answer.NOTHING
        self.events.skipped_steps += 1
        return Answer.FORGET

    def own(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that are this model's."""
        known = self._versions or {id(parameter): 0 for parameter in self._parameters()}
        return [parameter for parameter in parameters if id(parameter) in known]

    def skip(self) -> Answer:
        """Note that the loop makes no step with the last gradients."""
        return Answer.NOTHING if self.state is State.IDLE else self._end(False)

    def see(self) -> None:
        """Note that this model has an optimizer whose steps are seen; undoes unseen steps."""
        if self.seen:
            return
        self.seen = True
        self.steps -= self._unseen_steps
        self.steps_seen -= self._unseen_steps
        if self._unseen_steps:
            self.onset = self._onset_before

    def agree(self) -> bool:
        """Agree with all ranks whether to compress; returns whether compression starts with this pass."""
        if self.config.is_onebit_adam or not self.config.compresses:
            return False
        before, onset = self.active, self.onset
        now = [optimizer.rates for optimizer in self._optimizers]
        self._together.ask(onset.started, self.seen, onset.may_start(self.config, self.steps, now))
        # A resumed run goes on compressing, which is no start.
        return self.active and not before and (not onset.started or onset.since == self.steps)

    def agreed(self, flag: bool) -> bool:
        """Return whether `flag` is set on all ranks that exchange gradients with this one."""
        return self._together.agreed(flag)

    def restart(self, steps: int) -> None:
        """Restart after `steps` optimizer steps."""
        self.steps = self.steps_seen = steps
        self.onset = Onset.at(self.config, steps)
        self._together.again()
        self.phase = Phase()
        self.state = State.IDLE
        self._prepared = 1.0
        self._partly = self._first_dropped = False
        self._passes = self._dropped_first = self._unseen_steps = 0
        for optimizer in self._optimizers:
            optimizer.waits = False

    @property
    def counts(self) -> Counts:
        return Counts(self.steps, self.steps_seen, self.onset.started)

    def go_on_from(self, earlier: Counts) -> None:
        """Count on from an earlier attachment of this model; compression that had started goes on."""
        self.restart(earlier.steps)
        self.steps_seen = earlier.steps_seen
        self.onset.started |= earlier.started and self.config.compresses and not self.config.is_onebit_adam
        if self.announces:
            logger.info(
                "megatron-loco: attached again: steps count on from %d, errors start from zero", self.steps
            )

    def _end(
        self, successful: bool, factor: float = 1.0, rates: Sequence[float] | None = None, place: int = 0
    ) -> Answer:
        self.factor, self._prepared = factor * self._prepared, 1.0
        self.state = State.IDLE
        if successful:
            self._dropped_first *= self._first_dropped
            self._first_dropped = False
        self._passes = 0
        self.steps_seen += 1
        if not successful or self._partly:
            self.events.skipped_steps += 1
        self._partly = False
        if not successful:
            for optimizer in self._optimizers:
                optimizer.waits = False
            return Answer.SKIPPED
        compressed = self.active
        self.steps += 1
        self.onset.after_step(self.config, self.steps, rates, place)
        waits = self.config.compresses and not self.config.is_onebit_adam and not self.onset.started
        if waits and self.steps == LONG and self.announces:
            logger.warning("megatron-loco: %s", self.onset.what_it_waits_for(self.steps))
        interval = self.config.reset_interval
        if interval and self.config.keeps_errors and compressed and self.steps % interval == 0:
            self.events.resets += 1
            return Answer.RESET
        return Answer.ENDED

    def _place_of(self, optimizers: Sequence[object]) -> int:
        """Return the number of the record of optimizers that step together; a dead one's is used again."""
        parts = list(map(ref, optimizers))
        for place, known in enumerate(self._optimizers):
            if known.parts == parts:
                return place
        new = _Optimizer(parts, self.state is not State.IDLE)
        for place, known in enumerate(self._optimizers):
            if not known.alive:
                self._optimizers[place] = new
                return place
        self._optimizers.append(new)
        return len(self._optimizers) - 1

    def _changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of `parameters` was changed in place since the last pass began."""
        versions = self._versions
        return any(versions.get(id(p), p._version) != p._version for p in parameters)
