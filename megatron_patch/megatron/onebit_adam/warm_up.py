"""Decides when 1-bit Adam's warm-up is over: after `warmup_steps`, or when Adam's variance has settled.

`warmup: auto` compares the L1 norm of the bias-corrected variance v, over all parameters of the model, with
its value 1/(1-b2) steps ago, the time in which v forgets (arXiv 2102.02888, section 7.1). The warm-up is over
when the smaller of the two is at least `SETTLED` times the larger, and the learning rate has not risen in
between. While the rate rises, the norm may change direction and pass its old value by chance.

The steps that are compared are those that made the variance, as Adam counts them, not the job's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.session.onset import Phase

SETTLED = 0.96


class ModelRanks:
    """All ranks that hold a part or a copy of one model.

    Args:
        chunk: the DDP instance of Megatron, which has the process groups.
    """

    def __init__(self, chunk: Any) -> None:
        pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
        groups = [chunk.dp_cp_group, chunk.tp_group, pipeline]
        self._groups = [group for group in groups if group is not None and group.size() > 1]
        self.alone = chunk.dp_cp_group.size() == chunk.expt_dp_group.size() == 1
        """Whether every data-parallel group is a single rank, so that nothing is exchanged."""

    def reduce(self, values: Sequence[float | torch.Tensor], op: Any) -> list[float]:
        """Reduce scalars over the model's ranks, by sum, maximum or minimum; all of them must call this."""
        device = "cuda" if any("nccl" in dist.get_backend(group) for group in self._groups) else "cpu"
        scalars = [torch.as_tensor(value, dtype=torch.float64).to(device) for value in values]
        total = torch.stack(scalars)
        for group in self._groups:
            dist.all_reduce(total, op=op, group=group)
        reduced: list[float] = total.tolist()
        return reduced


class Masses:
    """The mass of each tensor's variance in the warm-up: 1 - b2^T after T steps since the variance began.

    Adam's counter does not tell, since other code may zero a tensor's moments and keep the counter.

    Args:
        parts: this rank's optimizers, none of which chains others.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._known: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """For each optimizer the masses, fp64 [n], and which variances have been above zero, bool [n]."""
        self._next: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin_step(self) -> None:
        """Look at the variances before a step of Adam's; nothing waits for the device."""
        self._next = []
        for place, part in enumerate(self._parts):
            norms = _norms(part)
            if self._known is None:
                above = norms > 0
                mass = above.double() * (1 - _beta2(part) ** adam_steps(part))
            else:
                mass, above = self._known[place]
                mass = mass * ((norms > 0) | ~above)  # One that was zeroed begins anew.
                above = above | (norms > 0)
            self._next.append((mass, above))

    def end_step(self) -> None:
        """Count a step that was made."""
        weights = (1 - _beta2(part) for part in self._parts)
        self._known = [
            ((1 - weight) * mass + weight, above)
            for weight, (mass, above) in zip(weights, self._next, strict=True)
        ]

    def make_equal(self, steps: int) -> None:
        """Scale the variances to the mass 1 - b2^steps, which Adam's counter of `steps` says."""
        for part, (masses, _) in zip(self._parts, self._known or (), strict=True):
            whole = 1 - _beta2(part) ** steps
            for parameter, mass in zip(_parameters(part), masses.tolist(), strict=True):
                if abs(mass - whole) > 1e-9 * whole and (state := part.optimizer.state.get(parameter)):
                    state["exp_avg_sq"].mul_(whole / mass)


def _beta2(part: Any) -> float:
    groups = part.optimizer.param_groups
    return float(groups[0]["betas"][1]) if groups else 0.0


def _parameters(part: Any) -> list[torch.Tensor]:
    return [p for group in part.optimizer.param_groups for p in group["params"] if p.numel()]


def _norms(part: Any) -> torch.Tensor:
    """Return the L1 norm of each parameter's variance, fp64 [n]; 0 where it has none yet."""
    states = (part.optimizer.state.get(parameter, {}) for parameter in _parameters(part))
    variances = [state.get("exp_avg_sq") for state in states]
    held = [variance for variance in variances if variance is not None]
    known = iter(torch._foreach_norm(held, 1)) if held else iter(())
    none = torch.zeros((), device=held[0].device if held else "cpu")
    norms = [none if variance is None else next(known) for variance in variances]
    return torch.stack(norms).double() if norms else torch.zeros(0, dtype=torch.float64)


def over(phase: Phase, steps: int, length: int | None, parts: Sequence[Any], model: ModelRanks) -> int | None:
    """Decide after a step whether the warm-up is over. All ranks of the model must call this.

    Args:
        phase: the phase of 1-bit Adam, in which the norms and the learning rate are recorded.
        steps: the optimizer steps of the job, including this one.
        length: the steps of a fixed warm-up; None ends it when the variance has settled.
        parts: this rank's optimizers, none of which chains others.
        model: the model's ranks.

    Returns:
        The number of steps that made the variance if the warm-up is over, else None.
    """
    if length is not None and steps < length:
        return None
    rates = [float(group["lr"] or 0.0) for part in parts for group in part.optimizer.param_groups]
    variances = [state["exp_avg_sq"] for part in parts for state in part.optimizer.state.values()]
    sizes = [variance.sum(dtype=torch.float64) for variance in variances]
    (norm,) = model.reduce([torch.stack(sizes).sum() if sizes else 0.0], dist.ReduceOp.SUM)
    rate, variance_steps, beta2 = model.reduce(
        [
            max(rates, default=0.0),
            max(map(adam_steps, parts), default=0),
            max((part.config.adam_beta2 for part in parts), default=0.0),
        ],
        dist.ReduceOp.MAX,
    )
    if length is not None:
        return int(variance_steps) if variance_steps - phase.warm_up_from >= length and norm > 0 else None
    rising, phase.learning_rate = rate > phase.learning_rate, rate
    if rising:
        phase.norms = []
        return None
    window = round(1 / (1 - beta2))
    phase.norms = [*phase.norms, norm / (1 - beta2 ** max(variance_steps, 1))][-window - 1 :]
    if len(phase.norms) <= window:
        return None
    now, then = phase.norms[-1], phase.norms[0]
    return int(variance_steps) if min(now, then) >= SETTLED * max(now, then) > 0 else None


def adam_steps(part: Any) -> int:
    """Return how many steps the Adam inside a Megatron optimizer has made; 0 if it holds no parameter."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state.get(parameter, {})
            if "step" in state:
                return int(state["step"])
        if "step" in group:  # Apex's and Transformer Engine's FusedAdam
            return int(group["step"])
    return 0
