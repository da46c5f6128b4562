"""What a compressed step of 1-bit Adam begins with, and what a loop may do between its halves."""

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
class Found:
    """What all ranks of the model agree on before a compressed step."""

    norm: float
    """The norm of the mean gradient; NaN after an overflow."""
    unlike: bool
    """Whether Adam's momentum is not what was exchanged last."""
    scale: float
    """fp16's loss scale that the gradients carry."""

    @property
    def overflows(self) -> bool:
        return not math.isfinite(self.norm)


class Prepared:
    """A compressed step between its halves: the loop may read gradients and their norm, and clip them.

    The gradients are copies of what this rank's own backward passes left. By how much the loop has scaled
    them is read from one element of each optimizer.
    """

    def __init__(self, optimizer: Any, parts: Sequence[Any], found: Found) -> None:
        self.found = found
        copy_gradients(parts)
        self._probes: list[tuple[torch.Tensor, float]] = []
        for part in parts:
            for parameter, _ in own(part):
                parameter.grad = parameter.grad / found.scale  # a copy: it may lie in the gradient buffer
            largest = ((p.grad.view(-1)[p.grad.abs().argmax()], p) for p, _ in own(part))
            probe = next((element for element, _ in largest if element), None)
            if probe is not None:
                self._probes.append((probe, float(probe)))

        def clip_grad_norm(limit: float) -> float:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, limit, found.norm)
            return found.norm

        self._overrides = [
            patching.override(optimizer, "get_grad_norm", lambda: found.norm),
            patching.override(optimizer, "clip_grad_norm", clip_grad_norm),
        ]

    def clipped_by(self) -> float:
        """The factor; ends what the loop sees."""
        for override in self._overrides:
            override.undo()
        return min((float(element) / before for element, before in self._probes), default=1.0)


def own(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The parameters of one of Megatron's optimizers that have gradients, each with Adam's state."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.numel():
                yield parameter, part.optimizer.state.get(parameter, {})


def copy_gradients(parts: Sequence[Any]) -> None:
    """Give the optimizers' parameters the `main_grad` of the model's."""
    for part in parts:
        if isinstance(part, FP32Optimizer):
            part.prepare_grads()
        else:
            part._copy_model_grads_to_main_grads()


def magnitudes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The L1 norm of each tensor, fp64 [n]."""
    return torch.stack(torch._foreach_norm(tensors, 1)).double()
