"""Lets Megatron's distributed optimizer load a checkpoint where torch's own Adam is inside it.

That is so where neither Transformer Engine nor Apex is installed. Upstream (0.17 to 0.19) fails there:

- `state_dict`, with which loading begins, asserts that parameters have a step count; before its first step
  Adam has none.
- `load_state_dict` gives all parameters one and the same tensor as step count, which each of them increments,
  and then overwrites it with the 0 that loading began with: Adam corrects its bias as in a first step, and a
  resumed run goes other ways than one that was never ended. The right count is in the parameter groups.
- In fp32 the optimizer's shards are views of the model's parameters, and are written to without `no_grad`.

What is saved is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patch.megatron import patching, symbols


def install() -> None:
    """Repair DistributedOptimizer, until `uninstall`. Idempotent; with Apex or TE it changes nothing."""
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        patching.replace(symbols.STATE_DICT, _with_step_counts)
        patching.replace(symbols.LOAD_STATE_DICT, _with_saved_step_counts)


def uninstall() -> None:
    """Give DistributedOptimizer its own methods back."""
    patching.restore(symbols.STATE_DICT, symbols.LOAD_STATE_DICT)


def _with_step_counts(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def with_step_counts(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
        return state_dict(self)

    return with_step_counts


def _with_saved_step_counts(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def with_saved_step_counts(self: Any, loaded: Any) -> None:
        with torch.no_grad():
            load_state_dict(self, loaded)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(
                    float(group["step"]), dtype=torch.float32
                )

    return with_saved_step_counts
