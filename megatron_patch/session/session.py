"""What one model holds while its exchanges are compressed, whatever trains it.

A Session knows the exchanges of the model's gradients, counts optimizer steps, and clears or rescales all
error states at once when a step asks for it. What attaches the model starts exchanges through it and reports
how an optimizer step ended; metrics, logs and checkpoints read it. With Megatron a session is one model
chunk, a DDP instance.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import Exchange, Handle, Setup, Traffic
from megatron_patch.collectives.sender import MovingAverageError, Sender
from megatron_patch.collectives.workspace import Workspace, shared_pool
from megatron_patch.config import CompressionConfig
from megatron_patch.session.events import Events, SessionReport
from megatron_patch.session.memory import Memory
from megatron_patch.session.onset import LONG, Onset, Phase, StartTogether

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Exchanges of a rank over one group of ranks that may be under way at a time: so many buckets' payloads
are held in memory. Ranks may dispatch dense and expert buckets in unlike orders: an exchange that waited for
one of another group could wait for ever."""


class Session:
    """Compression state of one model on one rank.

    `steps` counts the optimizer steps that succeeded, `steps_seen` all of them.

    Args:
        config: the options.
        device: where the gradient buffers live.
        ranks: groups whose ranks exchange gradients with this one, which start together.
    """

    def __init__(
        self, config: CompressionConfig, device: torch.device, ranks: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        self.config = config
        self.announces = False  # set where one session speaks for all of the model and all ranks
        self.device = device
        self.workspace = Workspace(device, shared_pool(device))
        self.memory = Memory(lambda: (t for error in self._errors for t in error.tensors().values()))
        self.exchanges: list[Exchange] = []  # in the order of their allocation
        self._setup = Setup(config, self.workspace)
        self.steps = self.steps_seen = 0
        self.events = Events()
        self.report = SessionReport()
        self._traffic = Traffic()
        self._used: list[Sender] = []
        self._earlier: list[torch.Tensor] = []
        """What senders measured in earlier exchanges of this step, where a step has several."""
        self._inside_bytes = 0.0
        self.measures = True
        """Whether the next exchanges measure what they lose: metrics.py asks for it in steps that it logs."""
        self.ended_steps = self.exchanges_unseen = 0
        """Steps that this object has ended; `steps_seen` may come from a checkpoint."""
        self._optimizer_seen = False
        self._passes = 0
        self._stepped: set[int] = set()
        self._optimizers: list[set[int]] = []
        """Those that have stepped, in the order of their first steps, each by the ids of its parts."""
        self._unseen_steps = 0
        self._started_unseen = False
        self.onset = Onset.at(config, 0)
        self._together = StartTogether(ranks, device)
        self.phase = Phase()
        """The phase of 1-bit Adam."""
        self._prepared: float | None = None
        """By how much an optimizer that has prepared this step's gradients has changed the loss scale."""

    @property
    def active(self) -> bool:
        """Whether the next exchange is compressed: a method that does, from `start_step` on."""
        if self.config.is_onebit_adam:
            return self.phase.switch_step is not None and self.steps >= self.phase.switch_step
        return self.config.compresses and self._together.started

    @property
    def error_bytes(self) -> int:
        """Memory of all error states on this rank, in bytes."""
        return sum(error.nbytes for error in self._errors)

    @property
    def _errors(self) -> list[MovingAverageError]:
        return [sender.error for sender in self.senders if sender.error is not None]

    @property
    def setup(self) -> Setup:
        """What this model's exchanges are made with."""
        return dataclasses.replace(self._setup, config=self.config)

    @property
    def senders(self) -> list[Sender]:
        """All exchanges' senders, in the order of their allocation, owners of all-reduced shards too."""
        return [state.sender for exchange in self.exchanges for state in exchange.states()]

    def start(
        self,
        exchange: Exchange,
        tensor: torch.Tensor,
        output: torch.Tensor,
        average: bool,
        group: dist.ProcessGroup | None = None,
    ) -> Handle:
        """Start the exchange of one bucket over `group`; counts it, and ends one that began long ago."""
        in_flight = self.workspace.pool.in_flight.setdefault(group, deque())
        while len(in_flight) >= IN_FLIGHT:
            in_flight.popleft().wait()
        traffic = exchange.traffic(tensor)
        self.count(traffic.between)
        self._inside_bytes += traffic.inside
        senders = [state.sender for state in exchange.states()]
        for sender in senders:
            if sender.measures and sender in self._used:  # in an earlier microbatch of this step
                self._earlier.append(sender.statistics.clone())
            sender.measures = self.measures
        self._used += senders
        try:
            handle = exchange.start(tensor, output, average)
        except BaseException:
            in_flight.clear()  # nobody waits for these: they would be written into the next gradients
            raise
        in_flight.append(handle)
        return handle

    def count_inside(self, nbytes: float) -> None:
        """Count bytes sent inside a node, or inside a group of shards, apart from what travels between."""
        self._inside_bytes += nbytes

    def count(self, traffic: Traffic) -> None:
        """Count bytes sent to other ranks in this step, compressed or not."""
        self._traffic.add(traffic)

    @property
    def in_step(self) -> bool:
        """Whether low-bit gradients were exchanged that no optimizer has used yet."""
        return self._passes > 0 and not self._sends_momentum

    @property
    def unreduced(self) -> bool:
        """Likewise, of gradients that 1-bit Adam has left unreduced."""
        return self._passes > 0 and self._sends_momentum

    @property
    def _sends_momentum(self) -> bool:
        """Whether the optimizer's step is the exchange (1-bit Adam after its warm-up)."""
        return self.config.is_onebit_adam and self.active

    def exchange_begins(self, passes: int, rerun: bool) -> None:
        """A bucket group exchanges its gradients for the `passes`-th time since the last optimizer step.

        Where Megatron's state machine says so (`rerun`), a second exchange is that of a backward pass that
        ran again, and what the first one left must not count. Else, where optimizer steps were seen before,
        the loop exchanges several times a step. Else no optimizer of this loop can be seen, and exchanges are
        counted as steps.
        """
        self.memory.bring_back()
        if passes <= self._passes:
            return  # another bucket group of the same backward pass
        if self._prepared is not None:  # and did not use them: an overflow that another optimizer has found
            self.end_step(successful=False)
            passes = 1
        elif passes > 1 and not rerun and not self._optimizer_seen:
            self.end_unseen_step()
            passes = 1
        self._passes = passes
        if passes > 1 and not self._sends_momentum:
            self._used, self._earlier = [], []  # the later exchange is the step's
            if rerun:
                self.events.replays += 1
                self.clear_errors()
                self._traffic, self._inside_bytes = Traffic(), 0.0
            else:
                if not self.events.repeated_exchanges and self.announces:
                    logger.warning(
                        "megatron-loco: gradients are exchanged more than once in an optimizer step: what an "
                        "exchange loses is added to the next one"
                    )
                self.events.repeated_exchanges += 1
        self._agree()

    def _agree(self) -> None:
        """Before the first exchange of a pass: do all ranks compress?"""
        if self.config.is_onebit_adam or not self.config.compresses:
            return
        before, onset = self.active, self.onset
        self._together.ask(onset.started, self._optimizer_seen)
        starts = self.active and not before and (not onset.started or onset.since == self.steps)
        if starts and self.announces:  # not where a resumed run compresses on
            logger.info("megatron-loco: compression starts at step %d", self.steps_seen + 1)

    def end_unseen_step(self) -> None:
        """Count an exchange as a step, in a loop whose optimizer cannot be seen. Nothing in other loops."""
        if self._optimizer_seen or not self._passes:
            return
        if self._sends_momentum:
            raise RuntimeError(
                "megatron-loco: onebit_adam left gradients unreduced, and no step of a Megatron optimizer "
                "has used them: step the optimizer that get_megatron_optimizer returns"
            )
        if not self._unseen_steps:
            logger.warning("megatron-loco: no optimizer step was seen: counting gradient exchanges as steps")
        waited = not self.onset.started
        self.end_step(successful=True)
        self._unseen_steps += 1
        self._started_unseen |= waited and self.onset.started

    def optimizer_prepared(self, loss_scale_factor: float) -> None:
        """An optimizer has prepared this step's gradients; if it does not use them, its step was skipped."""
        if self._passes:
            self._prepared = (self._prepared or 1.0) * loss_scale_factor

    def optimizer_stepped(
        self, optimizers: Sequence[object], successful: bool, loss_scale_factor: float, rates: Sequence[float]
    ) -> bool:
        """Optimizers, without chains around them, have made a step; returns whether it ends one of the model.

        A loop may step several optimizers of one model one by one, with the gradients of one exchange:
        together they make one step, which the first of them ends. The loss scale of fp16 is that one's.
        `successful` says whether parameters were updated, `rates` are the learning rates of their groups.
        """
        if not self._optimizer_seen:
            self._optimizer_seen = True
            self._forget_unseen_steps()
        stepped = {id(optimizer) for optimizer in optimizers}
        if stepped not in self._optimizers:
            self._optimizers.append(stepped)
        place = self._optimizers.index(stepped)
        if self.continues_step(optimizers):
            self._stepped |= stepped
            if successful:
                self.onset.after_another(self.steps, rates, place)
            if not successful and not self.config.is_onebit_adam:
                self.clear_errors()
            return False
        self._stepped = stepped
        self.end_step(successful, loss_scale_factor, rates, place)
        return True

    def loss_rescaled(self, factor: float) -> None:
        """Torch's GradScaler changed its scale, and skipped the step of gradients that still wait."""
        if self._passes and self._optimizer_seen:
            self.end_step(False, factor)
        elif factor != 1.0:
            self._scale_errors(factor)

    def continues_step(self, optimizers: Sequence[object]) -> bool:
        """Whether a step of these is part of the step that another optimizer of the model has ended."""
        stepped = {id(optimizer) for optimizer in optimizers}
        return not self._passes and bool(self._stepped) and self._stepped.isdisjoint(stepped)

    def _forget_unseen_steps(self) -> None:
        """What was counted before the first optimizer step were exchanges of gradients thrown away."""
        self.steps -= self._unseen_steps
        self.steps_seen -= self._unseen_steps
        if self._started_unseen:
            self.onset = Onset.at(self.config, self.steps)

    def restart(self, steps: int) -> None:
        """Begin as after `steps` optimizer steps, with errors of zero."""
        self.clear_errors()
        self.steps = self.steps_seen = steps
        self.onset = Onset.at(self.config, steps)
        self._together.again()
        self.phase = Phase()
        self._prepared = None
        self._passes = self._unseen_steps = 0
        self._started_unseen = False
        self.ended_steps += 1

    def end_step(
        self,
        successful: bool,
        loss_scale_factor: float = 1.0,
        rates: Sequence[float] | None = None,
        optimizer: int = 0,
    ) -> None:
        """End an optimizer step: report it, count it, clear or rescale the errors; `rates` as Onset's."""
        measured = [sender.statistics for sender in set(self._used) if sender.measures] + self._earlier
        self.report = SessionReport(
            traffic=self._traffic,
            compressed=bool(self._used),
            statistics=torch.stack(measured).sum(0) if measured else None,
            compression_seconds=self.workspace.lap(),
            inside_bytes=self._inside_bytes,
            step=self.steps_seen + 1,
        )
        loss_scale_factor *= self._prepared or 1.0
        self._traffic, self._used, self._earlier = Traffic(), [], []
        self._inside_bytes, self._passes, self._prepared = 0.0, 0, None
        self.workspace.pool.in_flight.clear()  # all chunks' are over when a step is
        self.steps_seen += 1
        self.ended_steps += 1
        was_active = self.active
        if successful:
            self.steps += 1
            interval = self.config.reset_interval
            if interval and self.config.keeps_errors and was_active and self.steps % interval == 0:
                self.events.resets += 1
                self.clear_errors()
        else:
            self.events.skipped_steps += 1
            if not self.config.is_onebit_adam:  # which exchanges nothing in a step that is skipped
                self.clear_errors()
        if loss_scale_factor != 1.0 and not self.config.is_onebit_adam:  # momentum carries no loss scale
            self._scale_errors(loss_scale_factor)
        if successful:
            self.onset.after_step(self.config, self.steps, rates, optimizer)
            if self.steps == LONG and not self.onset.started and self.announces:
                logger.warning("megatron-loco: %s", self.onset.what_it_waits_for(self.steps))

    def use_default_method_of(self, optimizer: object) -> bool:
        """Take the default method that Megatron's optimizer, by its name, has; returns whether it changes.

        The error that is pending stays as it is: e / (1 - beta) (docs/numerics.md).
        """
        config = self.config.for_optimizer(optimizer)
        if config == self.config:
            return False
        self._scale_errors((1 - config.beta) / (1 - self.config.beta))
        self.config = config
        for error in self._errors:
            error.beta = config.beta
        return True

    def _scale_errors(self, factor: float) -> None:
        self.memory.bring_back()
        for error in self._errors:
            error.scale_by(factor)

    def clear_errors(self) -> None:
        """e <- 0 in all buckets at once."""
        self.memory.bring_back()
        for error in self._errors:
            error.reset()
