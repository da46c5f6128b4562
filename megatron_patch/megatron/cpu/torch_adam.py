"""Lets Megatron's distributed optimizer load a checkpoint when it uses torch's own Adam.

It uses torch's Adam if neither Transformer Engine nor Apex is installed. Then megatron-core 0.17 to 0.19
cannot load a checkpoint correctly:

- `state_dict`, with which loading begins, asserts that parameters have a step count, which Adam does not
  create before its first step.
- `load_state_dict` gives all parameters the same tensor as step count, which each of them increments, and
  then overwrites it with the 0 with which loading began. So Adam corrects its bias as in a first step, and a
  resumed run differs from one that was not interrupted. The right count is in the parameter groups.
- In fp32 the optimizer's shards are views of the model's parameters, and are written to without `no_grad`.

Saved checkpoints are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patch.megatron import patching, symbols


def install() -> None:
    """Repair DistributedOptimizer until `uninstall`; with Apex or Transformer Engine this does nothing."""
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        patching.replace(symbols.STATE_DICT, _with_step_counts)
        patching.replace(symbols.LOAD_STATE_DICT, _with_saved_step_counts)


def uninstall() -> None:
    """Restore DistributedOptimizer's own methods."""
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
