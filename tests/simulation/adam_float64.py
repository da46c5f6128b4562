"""Adam with decoupled weight decay in float64: what a parameter should be after each step.

    p <- p - lr*wd*p
    m <- b1*m + (1-b1)*g        v <- b2*v + (1-b2)*g^2
    p <- p - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

As Megatron runs it: on an fp32 copy of the parameter, whose rounding is what `bound` allows for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        self.value = initial.astype(np.float64)
        self.mean = np.zeros_like(self.value)
        self.square = np.zeros_like(self.value)
        self.options = options
        self.decay = options.weight_decay if decays else 0.0
        self.steps = 0

    def step(self, gradient: np.ndarray) -> None:
        lr, (beta1, beta2) = self.options.lr, self.options.betas
        self.steps += 1
        self.value -= lr * self.decay * self.value
        self.mean = beta1 * self.mean + (1 - beta1) * gradient
        self.square = beta2 * self.square + (1 - beta2) * gradient**2
        unbiased = self.mean / (1 - beta1**self.steps)
        size = np.sqrt(self.square / (1 - beta2**self.steps))
        self.value -= lr * unbiased / (size + self.options.eps)

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
