"""1-bit Adam's arithmetic (arXiv 2102.02888, algorithm 1), on tensors alone.

After the warm-up the variance v is frozen, and m, the momentum, is what travels. Per step, on worker i of n:

    m_i = b1*m + (1-b1)*g_i                     `form`
    m   = C(mean of C(m_i + d_i) + D)           the low-bit all-reduce (collectives/all_reduce.py): d_i and D
                                                are its senders' and owners' errors
    x   = x - lr*(m^ / (sqrt(v^) + eps) + wd*x) `update`, m^ = m / (1 - b1^t), v^ = v / (1 - b2^T)

The paper leaves Adam's bias correction out; here it goes on as if nothing had happened: t counts all steps,
T the steps of the warm-up, in which v was made.
"""

from __future__ import annotations

import torch


def form(momentum: torch.Tensor, gradient: torch.Tensor, beta1: float, factor: float) -> None:
    """m <- b1*m + (1-b1)*factor*g in place: fp32 [B], and fp32, bf16 or fp16 [B]."""
    momentum.mul_(beta1).add_(gradient, alpha=(1 - beta1) * factor)


def update(
    parameter: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    eps: float,
    momentum_bias: float,
    variance_bias: float,
) -> None:
    """x <- x - lr*(m^ / (sqrt(v^) + eps) + weight_decay*x), all fp32 of one shape.

    `momentum_bias` is 1 - b1^t, `variance_bias` is 1 - b2^T. An element whose variance is 0 never had a
    gradient: what its momentum says is its block's rounding, and it stays put (but for weight decay).
    """
    if weight_decay:
        parameter.mul_(1 - lr * weight_decay)
    size = (variance / variance_bias).sqrt_().add_(eps)
    step = momentum / size
    step.masked_fill_(variance == 0, 0.0)
    parameter.add_(step, alpha=-lr / momentum_bias)
