"""When compression starts: after `start_step` optimizer steps, or when the learning rate has stopped rising.

What rounding adds costs most in the first steps, while Adam's second moment is young, and those steps are the
learning rate's warm-up. `start_step: auto` therefore reads the learning rates of all parameter groups at each
optimizer step. Compression starts when no rate has risen for more steps in a row than ever before a rise:
with Megatron's schedule one step after the last rise, with one that rises in stairs after the last stair. A
rate that has been the same since the first step may be the first stair: it is waited for `FIRST_STAIR` steps.

Megatron gives all ranks the same parameter groups, and their schedulers the same rates. Whatever ranks find,
they start together (`StartTogether`). A skipped step does not count: it leaves the scheduler where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.config import CompressionConfig

FIRST_STAIR = 10
LONG = 2000
"""Steps after which the log says what the start of compression waits for."""
_ROUNDING = 1e-9
"""Relative: by less a schedule's own arithmetic may differ from one step to the next."""
_SCHEDULED = 0.3
"""Relative: a rate that falls by more right after it rose is that of another schedule, after a resume."""


@dataclass
class Onset:
    """Whether the compression of gradients has started. Saved with every checkpoint; it starts once only."""

    started: bool = False
    rates: list[list[float]] = field(default_factory=list)
    """Learning rates of each optimizer's last successful step, by parameter group; optimizers in the order of
    their first steps."""
    still: int = 0
    """Steps since a rate rose."""
    longest: int = 0
    """The most that `still` was before a rate rose."""
    moves: bool = False
    """Whether a rate has ever risen or fallen."""
    dropped: bool = False
    """Whether the last step's rates were those of another schedule."""
    since: int | None = None
    """Optimizer steps after which it started."""

    def after_step(
        self, config: CompressionConfig, steps: int, rates: Sequence[float] | None, optimizer: int = 0
    ) -> None:
        """Look at a successful step: does compression start with the next one?

        Args:
            config: the options; `start_step` is a number or "auto".
            steps: successful optimizer steps until now.
            rates: the step's learning rates by parameter group; None where no optimizer was seen.
            optimizer: the number of the optimizer, in the order of their first steps.
        """
        if rates is not None and self._stands_still(rates, optimizer):
            self.still += 1
        if self.started or not config.compresses or config.is_onebit_adam:
            return
        if isinstance(config.start_step, int):
            self.started = steps >= config.start_step
        elif rates is None:  # nothing will ever tell more
            self.started = True
        else:
            enough = max(self.longest + 1, len(self.rates), 1 if self.moves else FIRST_STAIR)
            self.started = self.still >= enough
        self.since = steps if self.started else None

    def after_another(self, steps: int, rates: Sequence[float], optimizer: int) -> None:
        """Look at another optimizer of the model, in the same step: where its rates rise, it is too early."""
        still, longest = self.still, self.longest
        if self._stands_still(rates, optimizer):
            return
        if self.still < still:  # the step had counted as one without a rise
            self.longest = max(longest, still - 1)
        if self.since == steps:
            self.started, self.since = False, None

    def what_it_waits_for(self, steps: int) -> str:
        """A line for the log of a job that has waited long."""
        rates = ", ".join(f"{rate:g}" for optimizer in self.rates for rate in optimizer)
        return (
            f"after {steps} steps compression has not started: start_step auto waits for learning rates that "
            f"no longer rise ({rates or 'no rate was seen'}); a number as start_step starts it"
        )

    def _stands_still(self, rates: Sequence[float], optimizer: int) -> bool:
        """Whether an optimizer's rates have not risen since its last step; notes them."""
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
        """After `steps` successful optimizer steps of which nothing else is known."""
        start = config.start_step
        return cls(not config.is_onebit_adam and isinstance(start, int) and steps >= start)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], config: CompressionConfig) -> Onset:
        """The saved one, by the options of this run. What has started stays started.

        Checkpoints of releases before 0.3 have none: it follows from their `start_step`.
        """
        now, saved = cls.at(config, manifest["steps"]), manifest["config"]
        if "onset" in manifest:
            found = cls(**manifest["onset"])
            if found.rates and not isinstance(found.rates[0], list):  # before 0.3: of one optimizer
                found.rates = [found.rates]
        else:
            start = saved.get("start_step", 0)
            onebit = saved["method"] == "onebit_adam"
            found = cls(not onebit and isinstance(start, int) and manifest["steps"] >= start)
        found.started |= now.started
        return found


@dataclass
class Phase:
    """How far 1-bit Adam is (megatron/onebit_adam/warm_up.py).

    Saved with every checkpoint, so that a resumed run decides as one left alone.
    """

    switch_step: int | None = None
    """Optimizer steps after which momentum is sent in 1 bit; None in the warm-up."""
    variance_steps: int | None = None
    """Steps that made Adam's variance, which is frozen now; None in the warm-up."""
    norms: list[float] = field(default_factory=list)
    """L1 norms of the variance after the last steps without a rise of the learning rate, oldest first;
    `warmup: auto` alone."""
    learning_rate: float = 0.0
    """The largest of the last step."""
    warm_up_from: int = 0
    """Adam's steps when the warm-up began; more than 0 where a variance was lost."""


class StartTogether:
    """Whether all ranks that exchange gradients with this one compress them: they start together.

    Ranks read the learning rates by themselves, and one that has seen no optimizer step yet (its parameters
    are another rank's, in a loop with a ZeRO of its own) follows those that have.

    Args:
        ranks: the groups of those ranks.
        device: of tensors that the groups' collectives take.
    """

    def __init__(self, ranks: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        # A fake group stands for ranks that do not exist.
        self._ranks = [group for group in ranks if group.size() > 1 and dist.get_backend(group) != "fake"]
        self._device = device
        self.again()

    def again(self) -> None:
        """Ask anew, as after a checkpoint was loaded."""
        self.started = self._for_good = False

    def ask(self, wants: bool, seen: bool) -> None:
        """Before the first exchange of a pass; every rank calls it. One small all-reduce until it is settled.

        Args:
            wants: whether this rank's onset has started.
            seen: whether this rank has seen an optimizer step.
        """
        if self._for_good:
            return
        answers = [wants or not seen, not seen, wants]
        if self._ranks:
            smallest = torch.tensor(answers, dtype=torch.int32, device=self._device)
            for group in self._ranks:
                dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
            answers = smallest.tolist()
        those_that_saw, nobody_saw, everyone = answers
        self.started = bool(everyone if nobody_saw else those_that_saw)
        self._for_good = self.started and not nobody_saw


def _rises(before: float, now: float) -> bool:
    return now > before * (1 + _ROUNDING)
