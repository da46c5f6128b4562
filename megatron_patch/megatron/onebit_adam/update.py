"""The arithmetic of 1-bit Adam (arXiv 2102.02888, algorithm 1), as functions of tensors.

After the warm-up the variance v is frozen, and the momentum m is exchanged. Per step, on worker i of n:

    m_i = b1*m + (1-b1)*g_i                     `form`
    m   = C(mean of C(m_i + d_i) + D)           the low-bit all-reduce (collectives/all_reduce.py): d_i and D
                                                are its senders' and owners' errors
    x   = x - lr*(s + wd*x)                     `update`, s = m^ / (sqrt(v^) + eps) within +-most,
                                                m^ = m / (1 - b1^t), v^ = v / (1 - b2^T)

The paper leaves out Adam's bias correction; here it is kept: t counts all steps, and T the steps of the
warm-up, which made v. `most` bounds the step, as Adam's own steps are bounded (arXiv 1412.6980, section 2.1).
With a frozen v they would not be: an element with hardly any gradient in the warm-up has hardly any v, while
a 1-bit code gives every element of a block a momentum as large as the block's mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_AT_ONCE = 1 << 26
"""How many elements are updated at a time."""


@dataclass(frozen=True)
class Sizes:
    """The scalars of one step that are the same for all parameters of an optimizer's group."""

    lr: float
    weight_decay: float
    eps: float
    momentum_bias: float
    """1 - b1^t."""
    variance_bias: float
    """1 - b2^T."""
    most: float
    """The bound of a step, in units of the learning rate (`most`)."""


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The tensors x, m, v, and Adam's own m (`exp_avg`) of one parameter, all of the same shape."""


def form(momentum: torch.Tensor, gradient: torch.Tensor, beta1: float, factor: float) -> None:
    """Compute m <- b1*m + (1-b1)*factor*g in place; m is fp32 [B], g fp32, bf16 or fp16 [B]."""
    momentum.mul_(beta1).add_(gradient, alpha=(1 - beta1) * factor)


def update(parameters: Sequence[Tensors], sizes: Sizes) -> None:
    """Compute x <- x - lr*(s + weight_decay*x) and exp_avg <- m in fp32.

    Here s = m^ / (sqrt(v^) + eps), clamped to +-most. An element whose variance is 0 never had a gradient, so
    that its momentum is only its block's rounding: it gets weight decay and no step.
    """
    largest = sizes.most * sizes.momentum_bias
    for some in _batches(parameters):
        x, momentum, variance, exp_avg = (list(tensors) for tensors in zip(*some, strict=True))
        torch._foreach_copy_(exp_avg, momentum)
        if sizes.weight_decay:
            torch._foreach_mul_(x, 1 - sizes.lr * sizes.weight_decay)
        size = torch._foreach_div(variance, sizes.variance_bias)
        torch._foreach_sqrt_(size)
        torch._foreach_add_(size, sizes.eps)
        step = torch._foreach_div(momentum, size)
        torch._foreach_clamp_min_(step, -largest)
        torch._foreach_clamp_max_(step, largest)
        torch._foreach_mul_(step, torch._foreach_sign(variance))  # 0 where the variance is
        torch._foreach_add_(x, step, alpha=-sizes.lr / sizes.momentum_bias)


def _batches(parameters: Sequence[Tensors]) -> Iterator[list[Tensors]]:
    """Yield some of the parameters at a time, because intermediate tensors take twice their memory."""
    some: list[Tensors] = []
    for tensors in parameters:
        some.append(tensors)
        if sum(x.numel() for x, *_ in some) >= _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def most(beta1: float, beta2: float) -> float:
    """Return the bound of a step in units of the learning rate: three times Adam's largest step.

    Adam's largest step is that of the first gradient after many zeros. Since the code gives all elements of
    a block one size, useful steps may be larger: bounded by Adam's largest step, mixtures of experts ended
    with a loss 0.4 % worse; bounded by three times it, they did not.
    """
    return 3 * max(1.0, (1 - beta1) / math.sqrt(1 - beta2))


def held(parameters: Sequence[Tensors], sizes: Sizes) -> torch.Tensor:
    """Count the elements whose steps are clamped to the bound, and those without variance: int64 [2]."""
    counts = torch.zeros(2, dtype=torch.int64, device=parameters[0][0].device if parameters else "cpu")
    for _, momentum, variance, _ in parameters:
        size = (variance / sizes.variance_bias).sqrt_().add_(sizes.eps)
        beyond = momentum.abs() > size.mul_(sizes.most * sizes.momentum_bias)
        counts[0] += (beyond & (variance != 0)).sum()
        counts[1] += (variance == 0).sum()
    return counts
