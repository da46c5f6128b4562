"""The exchanges and error states of one attached model, whatever trains it.

A Session has the exchanges of the model's gradients, their senders and errors, and counts bytes. Its Ledger
(steps.py) says when a step has ended and whether compression has started; the Session then clears or rescales
errors and makes the report. The code that attached the model starts exchanges through its Session and reports
what the training loop does; metrics, logs and checkpoints read it. With Megatron there is a Session for each
model chunk, which is a DDP instance.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import CARRIED, Exchange, Handle, Setup, Traffic
from megatron_patch.collectives.sender import MovingAverageError, Sender, try_kernels
from megatron_patch.collectives.topology import inside_shares
from megatron_patch.collectives.workspace import Stopwatch, Workspace, shared_pool
from megatron_patch.config import CompressionConfig
from megatron_patch.session.steps import Answer, Ledger, State
from megatron_patch.weights import gather

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""The exchanges over one process group that may be under way at a time, and whose payloads are in memory.
They are counted by group since ranks may start dense and expert buckets in different orders: if an exchange
waited for one of another group, ranks could wait for each other forever."""


@dataclass(frozen=True)
class Choice:
    """What is switched on in a step, of what is configured."""

    gradients: bool = True
    """Whether gradients are sent in low bits, once all ranks have started to."""
    weights: bool = False
    """Whether weights are gathered exactly, from their changes."""


@dataclass(frozen=True)
class Kept:
    """What the last trial of `weight_gather: auto` has decided; a checkpoint keeps it."""

    weights: bool
    """Whether the exact gather is kept."""
    bits: float
    """The bits that its messages took for each weight."""
    spent: int
    """Steps that trials took so far."""


@dataclass(frozen=True)
class SessionReport:
    """The exchanges of this rank in the last step that has ended."""

    traffic: Traffic = field(default_factory=Traffic)
    compressed: bool = False
    """Whether any exchange was compressed."""
    statistics: torch.Tensor | None = None
    """loco.STATISTICS, fp64 [5], summed over buckets; None if they were not measured."""
    compression_seconds: Callable[[], float] = float
    """Returns the time spent compressing and decompressing; on CUDA the call waits for the work."""
    inside_bytes: float = 0.0
    """Bytes sent to ranks of the same node by hop 1 of two hops; `traffic` counts hop 2."""
    wait_seconds: Callable[[], float] | None = None
    """Returns the time in which the step waited for exchanges, as `compression_seconds`; None if unknown."""
    step: int = 0
    """The session's `steps_seen` after this step; 0 if no step has ended."""


class Session:
    """The compression state of one model on one rank.

    Args:
        config: the options.
        device: the device of the gradients.
        ranks, parameters, there: as of Ledger.

    Raises:
        UserError: the device is a GPU for which the kernels cannot be compiled.
    """

    def __init__(
        self,
        config: CompressionConfig,
        device: torch.device,
        ranks: Sequence[dist.ProcessGroup] = (),
        parameters: Callable[[], Iterable[torch.Tensor]] = tuple,
        there: Callable[[], bool] | None = None,
    ) -> None:
        if config.compresses:
            try_kernels(config, device)
        if config.codes_weights:
            gather.try_kernels(device)
        self.config = config
        self.choice = Choice(weights=config.codes_weights)
        """Set between optimizer steps (session/trial.py), to the same on all ranks."""
        self.kept: Kept | None = None
        """What trial.py has decided, or a checkpoint says; trial.py makes it the choice where ranks agree."""
        self.disturbed = False
        """Whether the job has evaluated or saved since `choice` was set, so that times say nothing."""
        self.device = device
        self.ledger = Ledger(config, ranks, device, parameters, there)
        self.workspace = Workspace(device, shared_pool(device))
        self.memory = Memory(lambda: (t for error in self._all_errors for t in error.tensors().values()))
        self.on_restart: list[Callable[[], None]] = []
        """Called by `restart`, to clear what else is kept of earlier steps."""
        self.on_dropped: list[Callable[[], None]] = []
        """Called between passes, after steps that have ended without an optimizer's."""
        self.unstepped = 0
        """The number of these steps; outer steps count it down."""
        self.exchanges: list[Exchange] = []  # They are in the order of their allocation.
        self.of_weights: list[Exchange] = []
        """Exchanges of weights: errors carry no loss scale, and do not depend on which gradients are used."""
        self._setup = Setup(config, self.workspace)
        self.report = SessionReport()
        self._traffic = Traffic()
        self._used: dict[Sender, None] = {}
        """The senders that this step has used, in order."""
        self._earlier: list[torch.Tensor] = []
        """The senders' statistics of earlier exchanges in this step, if a step has several."""
        self._inside_bytes = 0.0
        self._waits = Stopwatch(device)
        self.watches = True
        """Whether waits are timed in the next step; metrics.py sets it for the steps before one it logs."""
        self.sees_waits = False
        """Whether all calls in which steps wait for exchanges of gradients and weights are `waiting`."""
        self.measures = True
        """Whether the next exchanges measure loco.STATISTICS; metrics.py sets it for steps that it logs."""
        self.scale: torch.Tensor | None = None
        """The loss scale that errors carry, fp32 []; None if no GradScaler has scaled this model's loss."""
        self._scale_before: torch.Tensor | None = None
        self._in_full: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether the next exchange is compressed."""
        return self.ledger.active and self.choice.gradients

    @property
    def error_bytes(self) -> int:
        return sum(error.nbytes for error in self._all_errors)

    @property
    def _errors(self) -> list[MovingAverageError]:
        return _errors_in(self.exchanges)

    @property
    def _all_errors(self) -> list[MovingAverageError]:
        return _errors_in([*self.exchanges, *self.of_weights])

    @property
    def setup(self) -> Setup:
        """The Setup with which this model's exchanges are created."""
        return dataclasses.replace(self._setup, config=self.config)

    @property
    def senders(self) -> list[Sender]:
        """The senders of all exchanges, owners of all-reduced shards included, in the order of allocation."""
        return [sender for exchange in self.exchanges for sender in exchange.senders]

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
        if group is not None and traffic.between.nbytes and not traffic.inside:
            # Every rank sends to every other one.
            self._traffic.inside += traffic.between.nbytes * inside_shares(group)[1]
        self._inside_bytes += traffic.inside
        for sender in exchange.senders:
            if sender.measures and sender in self._used:  # It has statistics of an earlier microbatch.
                self._earlier.append(sender.statistics.clone())
            sender.measures = self.measures
            sender.compensates = not self.ledger.sets_aside
        self._used |= dict.fromkeys(exchange.senders)
        try:
            handle = exchange.start(tensor, output, average)
        except BaseException:
            in_flight.clear()  # A later wait would write these results into the next step's gradients.
            raise
        in_flight.append(handle)
        return handle

    def carries(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Whether gradients of these dtypes can be compressed; the log names others, sent in full, once."""
        others = {str(dtype) for dtype in dtypes if dtype not in CARRIED}
        if self.ledger.announces and (new := others - self._in_full):
            self._in_full |= new
            logger.info(
                "megatron-loco: gradients of parameters in %s are sent in full", ", ".join(sorted(new))
            )
        return not others

    @property
    def _watches(self) -> bool:
        return self.sees_waits and self.watches

    def waiting(self) -> AbstractContextManager[None]:
        """Time the block, in which the step waits for exchanges, if waits are timed in this step."""
        return self._waits.timed() if self._watches else nullcontext()

    def count_inside(self, nbytes: float) -> None:
        """Count bytes that this step sends inside a node, or inside a shard group, apart from `count`."""
        self._inside_bytes += nbytes

    def count(self, traffic: Traffic) -> None:
        """Count bytes that this step sends to other ranks, compressed or not."""
        self._traffic.add(traffic)

    def pass_begins(self, part: object, rerun: bool = False, scale: torch.Tensor | None = None) -> None:
        """Note, before a part of the model is exchanged, which part it is: it may be the first of a pass.

        Args:
            part, rerun: as of Ledger.exchange.
            scale: the scale of a GradScaler that has scaled this pass's loss, fp32 [].
        """
        self.memory.bring_back()
        answer, agrees = self.ledger.exchange(part, rerun)
        self._follow(answer)
        if answer is Answer.REPLAYED and not self.ledger.sends_momentum:
            self._used, self._earlier = {}, []
            self.clear_errors(of_weights=False)
            self._traffic, self._inside_bytes = Traffic(), 0.0
        if scale is not None and scale is not self.scale:  # It is the same tensor for all parts of a pass.
            if self.scale is not None and not self.config.is_onebit_adam:
                factor = scale / self.scale
                if self.ledger.hides_overflows:  # A scale that falls says that the last step was skipped.
                    factor = factor * (factor >= 1)
                self._scale_errors(factor)
            # This stream may still read the old one, whose memory is another stream's.
            self.scale, self._scale_before = scale, self.scale
        if agrees and self.ledger.agree() and self.ledger.announces:
            logger.info("megatron-loco: compression starts at step %d", self.ledger.steps_seen + 1)

    def optimizer_stepped(self, optimizers: Sequence[object], successful: bool = True, **step: Any) -> bool:
        """Note a step, with the arguments of Ledger.step; returns whether it ends a step of the model."""
        return self._follow(self.ledger.step(optimizers, successful, **step), unstepped=0)

    def gradients_cleared(
        self, parameters: Iterable[torch.Tensor] | None = None, optimizer: object | None = None
    ) -> None:
        """Note that the loop clears gradients; arguments as of Ledger.clear."""
        self._follow(self.ledger.clear(parameters, optimizer))
        self._dropped()

    def skip_step(self) -> None:
        """Make no step with the last gradients, or, if they were used, go on after weights were put back."""
        if self.ledger.state is State.IDLE:
            self.clear_errors()
        self._follow(self.ledger.skip())
        self._dropped()

    def _dropped(self) -> None:
        for make_up in self.on_dropped if self.unstepped else ():
            make_up()

    def settle(self) -> None:
        """Between steps, count the last exchange as a step if no optimizer's step has ever been seen."""
        self._follow(self.ledger.settle())

    def restart(self, steps: int) -> None:
        """Restart after `steps` optimizer steps, with errors of zero."""
        self.clear_errors()
        self.scale = None
        self.ledger.restart(steps)
        self.kept, self.choice = None, Choice(weights=self.config.codes_weights)
        for forget in self.on_restart:
            forget()

    def _follow(self, answer: Answer, unstepped: int = 1) -> bool:
        """Do with errors what an event means; returns whether a step has ended."""
        ledger, momentum = self.ledger, self.config.is_onebit_adam
        if answer.ends:
            self.unstepped += unstepped
            self._report()
        # 1-bit Adam exchanges nothing in a step that is skipped, and momentum carries no loss scale.
        if answer is Answer.RESET or (answer in (Answer.SKIPPED, Answer.FORGET) and not momentum):
            self.clear_errors(of_weights=False)
        elif answer.ends and ledger.factor != 1.0 and not momentum:
            self._scale_errors(ledger.factor)
        return answer.ends

    def _report(self) -> None:
        measured = [sender.statistics for sender in self._used if sender.measures] + self._earlier
        self.report = SessionReport(
            traffic=self._traffic,
            compressed=bool(self._used),
            statistics=torch.stack(measured).sum(0) if measured else None,
            compression_seconds=self.workspace.lap(),
            wait_seconds=self._waits.lap() if self._watches else None,
            inside_bytes=self._inside_bytes,
            step=self.ledger.steps_seen,
        )
        self._traffic, self._used, self._earlier, self._inside_bytes = Traffic(), {}, [], 0.0
        self.workspace.pool.in_flight.clear()  # The exchanges of all chunks are over when a step ends.

    def use_default_method_of(self, optimizer: object) -> bool:
        """Use the default method for Megatron's `optimizer`, given by name; returns whether it changes.

        Errors are rescaled so that the gradient still to be sent, e / (1 - beta), is unchanged.
        """
        config = self.config.for_optimizer(optimizer)
        if config == self.config:
            return False
        self._scale_errors((1 - config.beta) / (1 - self.config.beta))
        self.config = self.ledger.config = config
        for error in self._errors:
            error.beta = config.beta
        return True

    def _scale_errors(self, factor: float | torch.Tensor) -> None:
        self.memory.bring_back()
        for error in self._errors:
            error.scale_by(factor)

    def clear_errors(self, of_weights: bool = True) -> None:
        """Set e <- 0 in all buckets, and in exchanges of weights unless `of_weights` is false."""
        self.memory.bring_back()
        for error in self._all_errors if of_weights else self._errors:
            error.reset()


def _errors_in(exchanges: Iterable[Exchange]) -> list[MovingAverageError]:
    senders = (sender for exchange in exchanges for sender in exchange.senders)
    return [sender.error for sender in senders if sender.error is not None]


class Memory:
    """Moves the tensors that `sources` return, called anew each time, to host memory and back.

    This is for engines that use the device for something else between steps, such as the rollouts of RL.
    Tensors and their views stay valid: their storage is resized to 0 and back, as these engines do with
    weights.
    """

    def __init__(self, *sources: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.sources = list(sources)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """The storages that are offloaded, each with its bytes in host memory."""

    @property
    def nbytes(self) -> int:
        """The bytes that the tensors take on the device now."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move all tensors to host memory, which is pinned for a GPU; offloaded ones stay there."""
        for storage in self._storages():
            if storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
                host.copy_(_bytes_of(storage))
                storage.resize_(0)
                self._away.append((storage, host))

    def bring_back(self) -> None:
        """Move offloaded tensors back to the device, bit for bit."""
        while self._away:
            storage, host = self._away.pop()
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)

    def _storages(self) -> list[torch.UntypedStorage]:
        tensors = (tensor for source in self.sources for tensor in source())
        return list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
