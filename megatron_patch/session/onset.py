"""When compression starts: after `start_step` optimizer steps, or when the learning rate has stopped rising.

Rounding errors do most harm in the first steps, while Adam's second moment is young, and these steps are the
learning rate's warm-up. `start_step: auto` therefore reads the learning rates of all parameter groups at each
optimizer step. Compression starts when no rate has risen for more steps in a row than ever before a rise:
with Megatron's schedule one step after the last rise; with a schedule that rises in stairs, after the last
stair. If no rate has changed since the first step, this may be the first stair, and compression starts after
`FIRST_STAIR` steps.

Megatron gives all ranks the same parameter groups and learning rates; even if ranks see different ones, they
start together (`StartTogether`). A skipped step does not count, since the schedule does not advance.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.config import CompressionConfig

FIRST_STAIR = 10
LONG = 2000
"""After this many steps without compression the log says what it waits for."""
_ROUNDING = 1e-9
"""A relative change of a rate that is below this is taken for rounding in the schedule's arithmetic."""
_SCHEDULED = 0.3
"""A rate that falls by more than this fraction right after a rise is another schedule's, after a resume."""


@dataclass
class Onset:
    """Decides when the compression of gradients starts, which happens once. Saved with every checkpoint."""

    started: bool = False
    rates: list[list[float]] = field(default_factory=list)
    """For each optimizer, in the order of their first steps, the learning rates of its parameter groups at
    its last successful step."""
    still: int = 0
    """Steps since a rate rose."""
    longest: int = 0
    """The largest value that `still` had before a rate rose."""
    moves: bool = False
    """Whether a rate has ever risen or fallen."""
    dropped: bool = False
    """Whether the last step's rates were those of another schedule (`_SCHEDULED`)."""
    since: int | None = None
    """The number of optimizer steps before compression started; None if it has not."""

    def after_step(
        self, config: CompressionConfig, steps: int, rates: Sequence[float] | None, optimizer: int = 0
    ) -> None:
        """Set `started` if compression starts after this successful step.

        Args:
            config: the options; `start_step` is a number or "auto".
            steps: the number of successful optimizer steps so far.
            rates: the step's learning rates by parameter group; None, for a step whose optimizer was not
                seen, counts as a constant rate.
            optimizer: the optimizer's number in `self.rates`.
        """
        if self._stands_still([1.0] if rates is None else rates, optimizer):
            self.still += 1
        if self.started or not config.compresses or config.is_onebit_adam:
            return
        if isinstance(config.start_step, int):
            self.started = steps >= config.start_step
        else:
            self.started = self.still >= self._enough
        self.since = steps if self.started else None

    def after_another(self, steps: int, rates: Sequence[float], optimizer: int) -> None:
        """Look at another optimizer of the model in the same step; if its rates rise, undo a start."""
        still, longest = self.still, self.longest
        if self._stands_still(rates, optimizer):
            return
        if self.still < still:  # The first optimizer had counted this step as one without a rise.
            self.longest = max(longest, still - 1)
        if self.since == steps:
            self.started, self.since = False, None

    def may_start(self, config: CompressionConfig, steps: int, now: Sequence[Sequence[float]]) -> bool:
        """Whether compression may have started after the next step, if `now` has its rates, as `rates`."""
        if self.started:
            return True
        if isinstance(config.start_step, int):
            return steps + 1 >= config.start_step
        later = copy.deepcopy(self)
        still = [later._stands_still(rates, optimizer) for optimizer, rates in enumerate(now or [[1.0]])]
        return all(still) and later.still + 1 >= later._enough

    @property
    def _enough(self) -> int:
        """How many steps without a rise are no stair of a warm-up."""
        return max(self.longest + 1, len(self.rates), 1 if self.moves else FIRST_STAIR)

    def what_it_waits_for(self, steps: int) -> str:
        """Return a warning for the log, for a job that has waited for LONG steps."""
        rates = ", ".join(f"{rate:g}" for optimizer in self.rates for rate in optimizer)
        return (
            f"after {steps} steps compression has not started: start_step auto waits for learning rates that "
            f"no longer rise ({rates or 'no rate was seen'}); a number as start_step starts it"
        )

    def _stands_still(self, rates: Sequence[float], optimizer: int) -> bool:
        """Record an optimizer's rates; returns whether none has risen since its last step."""
        self.rates += [[]] * (optimizer + 1 - len(self.rates))
        before, self.rates[optimizer] = self.rates[optimizer], list(rates)
        now = self.rates[optimizer]
        if len(before) != len(now) or not any(now):
            return False
        rose = any(_rises(*pair) for pair in zip(before, now, strict=True))
        fell = any(_rises(*pair) for pair in zip(now, before, strict=True))
        dropped = any(rate < old * (1 - _SCHEDULED) for old, rate in zip(before, now, strict=True))
        other = dropped and self.moves and self.still == 0 and not self.dropped
        self.moves, self.dropped = self.moves or rose or fell, other
        if rose:
            self.longest, self.still = max(self.longest, self.still), 0
        return not rose and not other

    @classmethod
    def at(cls, config: CompressionConfig, steps: int) -> Onset:
        """Create the state after `steps` successful optimizer steps of which nothing else is known."""
        start = config.start_step
        return cls(not config.is_onebit_adam and isinstance(start, int) and steps >= start)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], config: CompressionConfig) -> Onset:
        """Restore the state from a manifest; compression stays started, or starts by this run's options."""
        onset = cls(**manifest["onset"])
        onset.started |= cls.at(config, manifest["steps"]).started
        return onset


@dataclass
class Phase:
    """The phase of 1-bit Adam: its warm-up, or momentum in 1 bit (megatron/onebit_adam/warm_up.py).

    It is saved with every checkpoint, so that a resumed run takes the decisions of an uninterrupted one.
    """

    switch_step: int | None = None
    """The number of optimizer steps after which momentum is sent in 1 bit; None in the warm-up."""
    variance_steps: int | None = None
    """Adam's step count when its variance was frozen, which 1 - b2^t is the variance's mass of; None in the
    warm-up."""
    norms: list[float] = field(default_factory=list)
    """With `warmup: auto`, L1 norms of the variance after the last steps without a rise of the learning rate,
    oldest first."""
    learning_rate: float = 0.0
    """The largest learning rate of the last step."""
    warm_up_from: int = 0
    """Adam's step count when the warm-up began; more than 0 if a variance was lost."""


class StartTogether:
    """Makes all ranks that exchange gradients with this one start compression in the same step.

    Each rank reads the learning rates itself. A rank that has seen no optimizer step yet (because in a loop
    with its own ZeRO another rank updates its parameters) follows those that have.

    Args:
        ranks: the process groups of these ranks.
        device: the device of tensors for the groups' collectives.
    """

    def __init__(self, ranks: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        # The other ranks of a fake group do not exist.
        self._ranks = [group for group in ranks if group.size() > 1 and dist.get_backend(group) != "fake"]
        self._device = device
        self.again()

    def again(self) -> None:
        """Forget the answer, as after a checkpoint was loaded, so that `ask` asks again."""
        self.started = self._for_good = False
        self._last: _Answers | None = None

    def agreed(self, flag: bool) -> bool:
        """Return whether `flag` is set on all ranks, which must all call it."""
        smallest = torch.tensor(int(flag), device=self._device)
        for group in self._ranks:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        return bool(smallest)

    def ask(self, wants: bool, seen: bool, may_start: bool) -> None:
        """Set `started` to whether all ranks compress; every rank calls it before a pass's first exchange.

        It runs a small all-reduce until compression has started for good, and waits for the device only if
        in the last pass a rank might have started by now, as they all know from its answers.

        Args:
            wants: whether this rank's onset has started.
            seen: whether this rank has seen an optimizer step.
            may_start: whether this rank's onset may have started by the next pass.
        """
        if self._for_good:
            return
        answers: list[int] = [wants or not seen, not seen, wants, not may_start]
        if self._ranks:
            on_gpu = self._device.type == "cuda"  # Only pinned memory is copied without waiting.
            smallest = torch.tensor(answers, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
            smallest = smallest.to(self._device, non_blocking=True)
            for group in self._ranks:
                dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
            before, self._last = self._last, _Answers(smallest)
            if before is not None and before.read()[-1]:
                return
            answers = self._last.read()
        those_that_saw, nobody_saw, everyone, _ = answers
        self.started = bool(everyone if nobody_saw else those_that_saw)
        self._for_good = self.started and not nobody_saw


class _Answers:
    """What ranks have answered, int32, on the way to the host."""

    def __init__(self, answers: torch.Tensor) -> None:
        self._host, self._copied = answers, None
        if answers.is_cuda:
            self._host = torch.empty_like(answers, device="cpu", pin_memory=True)
            self._host.copy_(answers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        answers: list[int] = self._host.tolist()
        return answers


def _rises(before: float, now: float) -> bool:
    return now > before * (1 + _ROUNDING)
