"""The state of one attached model, whatever trains it.

A Session has the exchanges of the model's gradients, counts optimizer steps, and clears or rescales all error
states when a step needs it. The code that attached the model starts exchanges through its Session and tells
it how optimizer steps end; metrics, logs and checkpoints read it. With Megatron there is a Session for each
model chunk, which is a DDP instance.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import Exchange, Handle, Setup, Traffic
from megatron_patch.collectives.sender import MovingAverageError, Sender, try_kernels
from megatron_patch.collectives.workspace import Workspace, shared_pool
from megatron_patch.config import CompressionConfig
from megatron_patch.session.events import Events, SessionReport
from megatron_patch.session.memory import Memory
from megatron_patch.session.onset import LONG, Onset, Phase, StartTogether
from megatron_patch.weights import gather

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""The exchanges over one process group that may be under way at a time, and whose payloads are in memory.
They are counted by group since ranks may start dense and expert buckets in different orders: if an exchange
waited for one of another group, ranks could wait for each other forever."""


class Session:
    """The compression state of one model on one rank.

    `steps` counts the optimizer steps that succeeded, `steps_seen` all of them.

    Args:
        config: the options.
        device: the device of the gradients.
        ranks: the process groups whose ranks exchange gradients with this one; they start together.

    Raises:
        UserError: the device is a GPU for which the kernels cannot be compiled.
    """

    def __init__(
        self, config: CompressionConfig, device: torch.device, ranks: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        if config.compresses:
            try_kernels(config, device)
        if config.codes_weights:
            gather.try_kernels(device)
        self.config = config
        self.announces = False  # Set for the one session that logs for all parts of the model and all ranks.
        self.device = device
        self.workspace = Workspace(device, shared_pool(device))
        self.memory = Memory(lambda: (t for error in self._errors for t in error.tensors().values()))
        self.exchanges: list[Exchange] = []  # They are in the order of their allocation.
        self._setup = Setup(config, self.workspace)
        self.steps = self.steps_seen = 0
        self.events = Events()
        self.report = SessionReport()
        self._traffic = Traffic()
        self._used: list[Sender] = []
        self._earlier: list[torch.Tensor] = []
        """The senders' statistics of earlier exchanges in this step, if a step has several."""
        self._inside_bytes = 0.0
        self.measures = True
        """Whether the next exchanges measure loco.STATISTICS; metrics.py sets it for steps that it logs."""
        self.ended_steps = self.exchanges_unseen = 0
        """`ended_steps` counts steps that this object has ended; `steps_seen` may come from a checkpoint."""
        self._optimizer_seen = False
        self._passes = 0
        self._stepped: frozenset[int] = frozenset()
        self.first_part: object = None  # The part of a torch model that its first pass exchanged first.
        self._optimizers: list[frozenset[int]] = []
        """The optimizers that have stepped, in the order of their first steps, as the ids of their parts."""
        self._unseen_steps = 0
        self._started_unseen = False
        self.onset = Onset.at(config, 0)
        self._together = StartTogether(ranks, device)
        self.phase = Phase()
        self._prepared: float | None = None
        """The loss scale's change when an optimizer prepared this step's gradients; None: none prepared."""

    @property
    def active(self) -> bool:
        """Whether the next exchange is compressed."""
        if self.config.is_onebit_adam:
            return self.phase.switch_step is not None and self.steps >= self.phase.switch_step
        return self.config.compresses and self._together.started

    @property
    def error_bytes(self) -> int:
        return sum(error.nbytes for error in self._errors)

    @property
    def _errors(self) -> list[MovingAverageError]:
        return [sender.error for sender in self.senders if sender.error is not None]

    @property
    def setup(self) -> Setup:
        """The Setup with which this model's exchanges are created."""
        return dataclasses.replace(self._setup, config=self.config)

    @property
    def senders(self) -> list[Sender]:
        """The senders of all exchanges, owners of all-reduced shards included, in the order of allocation."""
        return [state.sender for exchange in self.exchanges for state in exchange.states()]

    def start(
        self,
        exchange: Exchange,
        tensor: torch.Tensor,
        output: torch.Tensor,
        average: bool,
        group: dist.ProcessGroup | None = None,
    ) -> Handle:
        """Start a bucket's exchange and count its bytes, once fewer than IN_FLIGHT over `group` run."""
        in_flight = self.workspace.pool.in_flight.setdefault(group, deque())
        while len(in_flight) >= IN_FLIGHT:
            in_flight.popleft().wait()
        traffic = exchange.traffic(tensor)
        self.count(traffic.between)
        self._inside_bytes += traffic.inside
        senders = [state.sender for state in exchange.states()]
        for sender in senders:
            if sender.measures and sender in self._used:  # It has statistics of an earlier microbatch.
                self._earlier.append(sender.statistics.clone())
            sender.measures = self.measures
        self._used += senders
        try:
            handle = exchange.start(tensor, output, average)
        except BaseException:
            in_flight.clear()  # A later wait would write these results into the next step's gradients.
            raise
        in_flight.append(handle)
        return handle

    def count_inside(self, nbytes: float) -> None:
        """Count bytes that this step sends inside a node, or inside a shard group, apart from `count`."""
        self._inside_bytes += nbytes

    def count(self, traffic: Traffic) -> None:
        """Count bytes that this step sends to other ranks, compressed or not."""
        self._traffic.add(traffic)

    @property
    def in_step(self) -> bool:
        """Whether gradients were exchanged that no optimizer has used yet."""
        return self._passes > 0 and not self._sends_momentum

    @property
    def unreduced(self) -> bool:
        """Whether 1-bit Adam has left gradients unreduced that no optimizer has used yet."""
        return self._passes > 0 and self._sends_momentum

    @property
    def _sends_momentum(self) -> bool:
        return self.config.is_onebit_adam and self.active

    def exchange_begins(self, passes: int, rerun: bool) -> bool:
        """Note a bucket group's `passes`-th exchange since an optimizer step; returns whether a pass begins.

        A second exchange has one of three reasons: with `rerun` Megatron's rerun state machine has repeated
        the backward pass, and the first exchange must not count; or, where steps were seen before, the loop
        exchanges several times a step; or its optimizer cannot be observed, and exchanges count as steps.
        """
        self.memory.bring_back()
        if passes <= self._passes:
            return False  # This is another bucket group of the same backward pass.
        if self._prepared is not None:  # It did not step, because another optimizer found an overflow.
            self.end_step(successful=False)
            passes = 1
        elif passes > 1 and not rerun and not self._optimizer_seen:
            self.end_unseen_step()
            passes = 1
        self._passes = passes
        if passes > 1 and not self._sends_momentum:
            self._used, self._earlier = [], []  # Only the last exchange of a step is reported.
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
        return True

    def agree(self) -> None:
        """Agree with all ranks, before the first exchange of a pass, whether to compress."""
        if self.config.is_onebit_adam or not self.config.compresses:
            return
        before, onset = self.active, self.onset
        self._together.ask(onset.started, self._optimizer_seen)
        starts = self.active and not before and (not onset.started or onset.since == self.steps)
        if starts and self.announces:  # `starts` is False if a resumed run goes on compressing.
            logger.info("megatron-loco: compression starts at step %d", self.steps_seen + 1)

    def end_unseen_step(self) -> None:
        """Count an exchange as a step if no optimizer step was seen so far; else do nothing."""
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
        """Note that an optimizer has prepared gradients; if it does not step then, the step was skipped."""
        if self._passes:
            self._prepared = (self._prepared or 1.0) * loss_scale_factor

    def optimizer_stepped(
        self, optimizers: Sequence[object], successful: bool, loss_scale_factor: float, rates: Sequence[float]
    ) -> bool:
        """Note a step of `optimizers`; returns whether it ends a step of the model.

        A loop may step several optimizers of one model one by one, after one exchange: together they make one
        step of the model, which the first of them ends, and whose loss scale is that of the first.

        Args:
            optimizers: the optimizers that stepped together, without the chained optimizer around them.
            successful: whether parameters were updated.
            loss_scale_factor: the factor by which fp16's loss scale has changed.
            rates: the learning rates of the parameter groups.
        """
        self._see_optimizer()
        stepped = frozenset(map(id, optimizers))
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
        """Note that torch's GradScaler changed its scale; if gradients are unused, it skipped their step."""
        if self._passes:
            self._see_optimizer()
            self.end_step(False, factor)
        elif factor != 1.0:
            self._scale_errors(factor)

    def continues_step(self, optimizers: Sequence[object]) -> bool:
        """Whether a step of `optimizers` belongs to the step that another optimizer has ended."""
        stepped = set(map(id, optimizers))
        return not self._passes and bool(self._stepped) and self._stepped.isdisjoint(stepped)

    def _see_optimizer(self) -> None:
        """Undo the counting of exchanges as steps, when the first optimizer step is seen."""
        if self._optimizer_seen:
            return
        self._optimizer_seen = True
        self.steps -= self._unseen_steps
        self.steps_seen -= self._unseen_steps
        if self._started_unseen:
            self.onset = Onset.at(self.config, self.steps)

    def restart(self, steps: int) -> None:
        """Restart after `steps` optimizer steps, with errors of zero."""
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
        """End a step: report and count it, clear or rescale errors; arguments as of Onset.after_step."""
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
        self.workspace.pool.in_flight.clear()  # The exchanges of all chunks are over when a step ends.
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
            if not self.config.is_onebit_adam:  # It exchanges nothing in a step that is skipped.
                self.clear_errors()
        if loss_scale_factor != 1.0 and not self.config.is_onebit_adam:  # Momentum carries no loss scale.
            self._scale_errors(loss_scale_factor)
        if successful:
            self.onset.after_step(self.config, self.steps, rates, optimizer)
            if self.steps == LONG and not self.onset.started and self.announces:
                logger.warning("megatron-loco: %s", self.onset.what_it_waits_for(self.steps))

    def use_default_method_of(self, optimizer: object) -> bool:
        """Use the default method for Megatron's `optimizer`, given by name; returns whether it changes.

        Errors are rescaled so that the gradient still to be sent, e / (1 - beta), is unchanged.
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
        """Set e <- 0 in all buckets."""
        self.memory.bring_back()
        for error in self._errors:
            error.reset()
