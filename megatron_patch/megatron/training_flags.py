"""The flags of Megatron's own training loop, where the job has one; other loops have none."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from typing import Any

_STEPS_LOOKED_AHEAD = 1_000_000


def all_flags() -> Mapping[str, Any]:
    """Megatron's parsed flags by name; empty in a job of another loop.

    `megatron.training.get_args` would raise there, and importing it costs seconds.
    """
    variables = sys.modules.get("megatron.training.global_vars")
    flags = getattr(variables, "_GLOBAL_ARGS", None)
    return {} if flags is None else vars(flags)


def get(name: str) -> Any:
    """One flag; None where it is not known."""
    return all_flags().get(name)


def lr_warmup_steps() -> int:
    """Optimizer steps of the learning rate's warm-up, as the flags of this job say; 0 without one.

    Megatron's scheduler counts samples. Its calculator of microbatches knows how many each step has, with
    batch ramp-ups and schedules of batch sizes: a copy of it is stepped through the warm-up.
    """
    samples = _lr_warmup_samples(all_flags())
    module = sys.modules.get("megatron.core.num_microbatches_calculator")
    calculator = copy.copy(getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None))
    if calculator is None:  # before Megatron's initialization
        return math.ceil(round(samples / (_number("global_batch_size") or math.inf), 6))
    consumed = steps = 0
    while consumed < samples and steps < _STEPS_LOOKED_AHEAD:
        calculator.update(consumed, False)
        consumed += calculator.get_current_running_global_batch_size()
        steps += 1
    return steps


def _lr_warmup_samples(flags: Mapping[str, Any]) -> float:
    """As Megatron's get_optimizer_param_scheduler counts them."""
    fraction, batch = _number("lr_warmup_fraction"), _number("global_batch_size")
    decay = batch * (_number("lr_decay_iters") or _number("train_iters"))
    decay = decay or _number("lr_decay_samples") or _number("train_samples")
    samples = fraction * decay or batch * _number("lr_warmup_iters") or _number("lr_warmup_samples")
    return round(samples, 6)


def _number(name: str) -> float:
    """A positive flag; 0 where it is not given."""
    value = get(name)
    known = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if known and value is not None else 0.0
