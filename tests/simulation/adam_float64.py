"""Torch's AdamW in float64: what a parameter should be after each step.

Megatron runs Adam on an fp32 copy of the parameter, whose rounding is what `bound` allows for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# Significant bits of a dtype, and the distance of its subnormal numbers.
PRECISION = {"bf16": (8, 2.0**-133), "fp16": (11, 2.0**-24)}


@dataclass(frozen=True)
class AdamOptions:
    """The optimizer's settings; `weight_decay` does not act on vectors (biases, norms)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0


class AdamSimulation:
    """One parameter, flat. `decays`: whether weight decay acts on it."""

    def __init__(self, initial: np.ndarray, options: AdamOptions, *, decays: bool):
        self._parameter = torch.from_numpy(initial.astype(np.float64)).requires_grad_()
        decay = options.weight_decay if decays else 0.0
        self._adam = torch.optim.AdamW(
            [self._parameter], options.lr, options.betas, options.eps, weight_decay=decay
        )
        self.options = options
        self.steps = 0

    @property
    def value(self) -> np.ndarray:
        return self._parameter.detach().numpy()

    def step(self, gradient: np.ndarray) -> None:
        self._parameter.grad = torch.from_numpy(gradient)
        self._adam.step()
        self.steps += 1

    def bound(self, dtype: str) -> np.ndarray:
        """How far the real parameter, of `dtype`, may be from `value`.

        Per step: two roundings of the fp32 copy (the decay's and the update's, half an ulp each), and an
        update (at most lr, here) computed in fp32 with a dozen roundings. A parameter of fewer bits is then
        half an ulp of its own off.
        """
        magnitude = np.abs(self.value)
        drift = self.steps * (2 * 2.0**-24 * magnitude + 12 * 2.0**-24 * self.options.lr)
        if dtype == "fp32":
            return drift
        bits, subnormal = PRECISION[dtype]
        return drift + np.maximum(2.0**-bits * magnitude, subnormal / 2)
