"""The state of a compressed step of 1-bit Adam between `prepare_grads` and `step_with_ready_grads`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron_patch.megatron import patching


@dataclass(frozen=True)
class Agreement:
    """The values on which all ranks of the model agree before a compressed step."""

    norm: float
    """The norm of the mean gradient; NaN after an overflow."""
    unlike: bool
    """Whether Adam's momentum differs from m, the momentum that was exchanged last."""
    restored: bool
    """Whether it does because other code has changed it: m is not new."""
    scale: float
    """The loss scale by which the gradients are multiplied with fp16."""

    @property
    def overflows(self) -> bool:
        return not math.isfinite(self.norm)


class Prepared:
    """A compressed step between its halves, where the loop may read the gradients and their norm, and clip.

    The gradients are copies of this rank's own, unreduced ones. By how much the loop has scaled them is read
    from one element of each optimizer.
    """

    def __init__(self, optimizer: Any, parts: Sequence[Any], agreement: Agreement) -> None:
        self.agreement = agreement
        copy_gradients(parts)
        self._probes: list[tuple[torch.Tensor, float]] = []
        for part in parts:
            for parameter, _ in own(part):
                parameter.grad = parameter.grad / agreement.scale  # In place it may change gradient buffers.
            largest = ((p.grad.view(-1)[p.grad.abs().argmax()], p) for p, _ in own(part))
            probe = next((element for element, _ in largest if element), None)
            if probe is not None:
                self._probes.append((probe, float(probe)))

        def clip_grad_norm(limit: float) -> float:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, limit, agreement.norm)
            return agreement.norm

        self._overrides = [
            patching.override(optimizer, "get_grad_norm", lambda: agreement.norm),
            patching.override(optimizer, "clip_grad_norm", clip_grad_norm),
        ]

    def clipped_by(self) -> float:
        """Return the factor by which the loop has scaled the gradients, and undo the overrides."""
        for override in self._overrides:
            override.undo()
        return min((float(element) / before for element, before in self._probes), default=1.0)


def own(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the parameters of a Megatron optimizer that have gradients, each with its state of Adam."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.numel():
                yield parameter, part.optimizer.state.get(parameter, {})


def copy_gradients(parts: Sequence[Any]) -> None:
    """Copy the `main_grad` of the model's parameters to the `grad` of the optimizers' parameters."""
    for part in parts:
        if isinstance(part, FP32Optimizer):
            part.prepare_grads()
        else:
            part._copy_model_grads_to_main_grads()


def magnitudes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the L1 norm of each of n tensors, fp64 [n]."""
    return torch.stack(torch._foreach_norm(tensors, 1)).double()
