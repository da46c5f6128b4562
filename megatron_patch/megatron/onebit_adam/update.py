"""1-bit Adam's arithmetic (arXiv 2102.02888, algorithm 1), on tensors alone.

After the warm-up the variance v is frozen, and m, the momentum, is what travels. Per step, on worker i of n:

    m_i = b1*m + (1-b1)*g_i                     `form`
    m   = C(mean of C(m_i + d_i) + D)           the low-bit all-reduce (collectives/all_reduce.py): d_i and D
                                                are its senders' and owners' errors
    x   = x - lr*(s + wd*x)                     `update`, s = m^ / (sqrt(v^) + eps) within +-most,
                                                m^ = m / (1 - b1^t), v^ = v / (1 - b2^T)

The paper leaves Adam's bias correction out; here it stays as in the warm-up: t counts all steps,
T the steps of the warm-up, in which v was made. `most` comes from the bound of Adam's own steps (arXiv
1412.6980, section 2.1), which a frozen v does not keep: an element that hardly had a gradient in the warm-up
has next to no v, and every momentum of its block is as large as the block's mean.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

import torch

from megatron_patch.megatron.onebit_adam.operands import Sizes, Tensors


def form(momentum: torch.Tensor, gradient: torch.Tensor, beta1: float, factor: float) -> None:
    """m <- b1*m + (1-b1)*factor*g in place: fp32 [B], and fp32, bf16 or fp16 [B]."""
    momentum.mul_(beta1).add_(gradient, alpha=(1 - beta1) * factor)


def update(parameters: Sequence[Tensors], sizes: Sizes) -> None:
    """x <- x - lr*(s + weight_decay*x), s = m^ / (sqrt(v^) + eps) within +-most, and exp_avg <- m, in fp32.

    An element whose variance is 0 never had a gradient: what its momentum says is its block's rounding, and
    it stays put (but for weight decay).
    """
    if any(tensor.device.type == "cuda" for tensors in parameters for tensor in tensors):
        # Triton is imported where a GPU is used only.
        kernel = importlib.import_module("megatron_patch.megatron.onebit_adam.update_kernel")
        parameters = kernel.update(parameters, sizes)
    for tensors in parameters:
        _update_one(*tensors, sizes)


def most(beta1: float, beta2: float) -> float:
    """The bound of a step, in learning rates: three times the largest that Adam makes.

    That is the step of the first gradient after many zeros. The code gives all of a block one size, so that
    good steps are above it: with the bound itself mixtures ended 0.4 % worse, with three times it not.
    """
    return 3 * max(1.0, (1 - beta1) / math.sqrt(1 - beta2))


def held(parameters: Sequence[Tensors], sizes: Sizes) -> torch.Tensor:
    """How many elements' steps the bound holds, and how many have no variance: int64 [2]."""
    counts = torch.zeros(2, dtype=torch.int64, device=parameters[0][0].device if parameters else "cpu")
    for _, momentum, variance, _ in parameters:
        size = (variance / sizes.variance_bias).sqrt_().add_(sizes.eps)
        beyond = momentum.abs() > size.mul_(sizes.most * sizes.momentum_bias)
        counts[0] += (beyond & (variance != 0)).sum()
        counts[1] += (variance == 0).sum()
    return counts


def _update_one(
    parameter: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    exp_avg: torch.Tensor,
    sizes: Sizes,
) -> None:
    exp_avg.copy_(momentum)
    if sizes.weight_decay:
        parameter.mul_(1 - sizes.lr * sizes.weight_decay)
    size = (variance / sizes.variance_bias).sqrt_().add_(sizes.eps)
    largest = sizes.most * sizes.momentum_bias
    step = (momentum / size).clamp_(-largest, largest)
    step.masked_fill_(variance == 0, 0.0)
    parameter.add_(step, alpha=-sizes.lr / sizes.momentum_bias)
