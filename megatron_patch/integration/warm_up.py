"""When 1-bit Adam's warm-up is over: after `warmup_steps`, or when Adam's variance has settled.

`warmup: auto` compares the L1 norm of the variance v, its bias corrected, over all parameters of the job with
what it was 1/(1-b2) steps ago, the time in which v forgets (arXiv 2102.02888, section 7.1). The warm-up is
over when the smaller is at least `SETTLED` of the larger, and the learning rate has not risen in between:
while it rises, the norm may turn, and pass its old value by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

SETTLED = 0.96


@dataclass
class Phase:
    """How far 1-bit Adam is. Saved with every checkpoint, so that a resumed run decides as one left alone."""

    switch_step: int | None = None
    """Optimizer steps after which momentum is sent in 1 bit; None: not known yet."""
    variance_steps: int | None = None
    """Steps that made Adam's variance, which is frozen now; None in the warm-up."""
    norms: list[float] = field(default_factory=list)
    """L1 norms of the variance after the last steps without a rise of the learning rate, oldest first;
    `warmup: auto` alone."""
    learning_rate: float = 0.0
    """The largest of the last step."""


def settled(phase: Phase, parts: Sequence[Any]) -> bool:
    """Look at Megatron's optimizers after a step of theirs. Every rank of the job must call it."""
    rates = [float(group["lr"]) for part in parts for group in part.optimizer.param_groups]
    sizes = [
        state["exp_avg_sq"].sum(dtype=torch.float64)
        for part in parts
        for state in part.optimizer.state.values()
    ]
    norm = torch.stack(sizes or [torch.zeros((), dtype=torch.float64, device="cpu")]).sum()
    steps = max(map(adam_steps, parts), default=0)
    beta2 = max((part.config.adam_beta2 for part in parts), default=0.0)
    most = torch.tensor([max(rates, default=0.0), steps, beta2], dtype=torch.float64, device="cpu")
    if "nccl" in dist.get_backend():
        norm, most = norm.cuda(), most.cuda()
    dist.all_reduce(norm)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    rate, steps, beta2 = most.tolist()
    rising, phase.learning_rate = rate > phase.learning_rate, rate
    if rising:
        phase.norms = []
        return False
    window = round(1 / (1 - beta2))
    phase.norms = [*phase.norms, float(norm) / (1 - beta2 ** max(steps, 1))][-window - 1 :]
    if len(phase.norms) <= window:
        return False
    now, then = phase.norms[-1], phase.norms[0]
    return min(now, then) >= SETTLED * max(now, then) > 0


def adam_steps(part: Any) -> int:
    """Steps that the Adam inside a Megatron optimizer has made; 0 where it holds no parameter."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state.get(parameter, {})
            if "step" in state:
                return int(state["step"])
        if "step" in group:  # Apex's and Transformer Engine's FusedAdam
            return int(group["step"])
    return 0
