"""What 1-bit Adam's arithmetic works on, in torch (norm_sketch.py, update.py) and in Triton (*_kernel.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLUMNS = 1021
"""K, the numbers of a sketch."""
STRETCH = 256 * COLUMNS
"""Elements of a gradient that take their signs from one place of the table."""


@dataclass(frozen=True)
class ScaledValues:
    """Elements that follow each other: `values`, of any float dtype, times `factor`.

    The k-th stretch of them takes its signs from the table's `starts`[k]-th on.
    """

    values: torch.Tensor
    factor: float
    starts: list[int]


@dataclass(frozen=True)
class Sizes:
    """What the parameters of one group of an optimizer have in common in a step."""

    lr: float
    weight_decay: float
    eps: float
    momentum_bias: float
    """1 - b1^t."""
    variance_bias: float
    """1 - b2^T."""
    most: float
    """The bound of a step, in learning rates (update.most)."""


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""x, m, v, and where Adam keeps its m (`exp_avg`); of one shape."""
