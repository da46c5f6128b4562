"""When compression starts: after `start_step` optimizer steps, or when the learning rate has stopped rising.

What rounding adds costs most in the first steps, while Adam's second moment is young, and those steps are the
learning rate's warm-up. `start_step: auto` therefore reads the learning rates of all parameter groups at each
optimizer step. Compression starts after the first step in which none of them was higher than in the step
before: with Megatron's schedule one step after the last rise, with a constant rate after the second step.

Megatron gives all ranks the same parameter groups, and their schedulers the same rates, so that all ranks
decide alike without communication. A skipped step does not count: it leaves the scheduler where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_patch.config import CompressionConfig

_ROUNDING = 1e-9
"""Relative: by less a schedule's own arithmetic may differ from one step to the next."""


def _rises(before: float, now: float) -> bool:
    return now > before * (1 + _ROUNDING)


@dataclass
class Onset:
    """Whether the compression of gradients has started. Saved with every checkpoint; it starts once only."""

    started: bool = False
    rates: list[float] = field(default_factory=list)
    """Learning rates of the last successful step, by parameter group; empty before the first one."""

    def after_step(self, config: CompressionConfig, steps: int, rates: Sequence[float] | None) -> None:
        """Look at a successful step: does compression start with the next one?

        Args:
            config: the options; `start_step` is a number or "auto".
            steps: successful optimizer steps until now.
            rates: the step's learning rates by parameter group; None where no optimizer was seen.
        """
        before, self.rates = self.rates, list(rates or [])
        if self.started or not config.compresses or config.is_onebit_adam:
            return
        if isinstance(config.start_step, int):
            self.started = steps >= config.start_step
        elif rates is None:  # nothing will ever tell more
            self.started = True
        else:
            same_groups = len(before) == len(self.rates) > 0
            self.started = same_groups and not any(map(_rises, before, self.rates))

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
        else:
            start = saved.get("start_step", 0)
            onebit = saved["method"] == "onebit_adam"
            found = cls(not onebit and isinstance(start, int) and manifest["steps"] >= start)
        return cls(found.started or now.started, found.rates)
