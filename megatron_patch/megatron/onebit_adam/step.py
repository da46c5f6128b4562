"""The step of 1-bit Adam, which takes the place of the step of Megatron's optimizers after the warm-up.

    warm-up       Megatron's own step runs on reduced gradients; warm_up.py decides when it ends
    from then on  bucket groups leave gradients unreduced (seams/gradients.py), finalize_model_grads works on
                  the unreduced ones (it is linear), and `step` replaces the optimizer's:

      1  estimate the norm of the mean gradient of the whole model; with a NaN or Inf the step is skipped
      2  m_i = b1*m + (1-b1)*g_i, with g_i clipped by one factor; the low-bit all-reduce averages the m_i to m
      3  x <- x - lr*(m^/(sqrt(v^)+eps) + wd*x) in place of the inner Adam's step; Megatron's own
         `step_with_ready_grads` does the rest: copies to bf16, gathers of sharded weights

Every rank holds all of m in fp32, in the order of the gradient buffers. Adam's state stays Megatron's: v is
`exp_avg_sq`, and every step copies its part of m to `exp_avg`, so that checkpoints, schedules and groups of
weight decay work unchanged. Before each step all ranks of the model compare this state with what it should
be. If other code has changed `exp_avg` (a rollback), m is taken from it, and errors start from zero. If v is
missing, of fewer steps than before, or zero in a tensor that gets gradients (another optimizer, zeroed
moments, a revived expert), the gradients are reduced in full and a new warm-up begins. Adam's step counter
counts the steps that made v, and so stands still while v is frozen: Megatron's own step can go on from there
at any time. The optimizers find their own parts of m: each parameter's `main_grad` is made a view of m
while they copy gradients.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_patch.megatron import patching
from megatron_patch.megatron.onebit_adam import update, warm_up
from megatron_patch.megatron.onebit_adam.norm_sketch import NormSketch
from megatron_patch.megatron.seams.gradients import BucketGroupSeam
from megatron_patch.megatron.seams.momentum import Replicas, find_replicas
from megatron_patch.megatron.seams.optimizer_step import leaves_of, loss_scale, model_parameters
from megatron_patch.megatron.unsupported import refuse_optimizer, refuse_unattached
from megatron_patch.session.onset import Phase
from megatron_patch.session.session import Session

logger = logging.getLogger(__name__)

StepResult = tuple[bool, float | None, int | None]
_NORM_EPS = 1e-6
"""The epsilon that Megatron adds to the norm in clip_grad_by_total_norm_fp32."""
_COUNTED_STEPS = (1, 10, 100, 1_000, 10_000, 100_000)
"""Steps after the warm-up in which the clamped elements are counted; counting takes a pass over them all."""
_UNLIKE = 1e-4
"""If the L1 norms of two momenta differ by a larger part, it is not because of the order of summation."""


@dataclass(frozen=True)
class Agreement:
    """The values on which all ranks of the model agree before a compressed step."""

    norm: float
    """The norm of the mean gradient; NaN after an overflow."""
    restored: bool
    """Whether other code has changed Adam's momentum: it differs from m, which is not new."""
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
        _copy_gradients(parts)
        self._probes: list[tuple[torch.Tensor, float]] = []
        for part in parts:
            for parameter, _ in _own(part):
                parameter.grad = parameter.grad / agreement.scale  # In place it may change gradient buffers.
            largest = ((p.grad.view(-1)[p.grad.abs().argmax()], p) for p, _ in _own(part))
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


class OneBitAdam:
    """Makes the steps of one Megatron optimizer, whose attached chunks exchange momentum.

    Args:
        optimizer: the Megatron optimizer, chained or not.
        attached: the DDP-wrapped chunks that it updates, each with its session and seams.

    Raises:
        UserError: the optimizer is not Adam, keeps its state where 1-bit Adam cannot read it, or updates
            models that are not attached.
    """

    def __init__(
        self, optimizer: Any, attached: Sequence[tuple[Any, Session, Sequence[BucketGroupSeam]]]
    ) -> None:
        self._optimizer = optimizer
        self._leaves = leaves_of(optimizer)
        self._parts = [part for part in self._leaves if not getattr(part, "is_stub_optimizer", False)]
        self._chunks = [chunk for chunk, _, _ in attached]
        for part in self._parts:
            refuse_optimizer(part)
        updated = (parameter for part in self._parts for parameter in model_parameters(part))
        refuse_unattached(self._parts, self._chunks, updated)
        self._sessions = [session for _, session, _ in attached]
        self._seams = [(session, seam) for _, session, seams in attached for seam in seams]
        self._momentum = [seam.momentum for _, seam in self._seams if seam.momentum is not None]
        self._copies: list[Replicas] | None = None
        self._model = warm_up.ModelRanks(self._chunks[0])
        self._ready: Prepared | None = None
        self._masses: warm_up.Masses | None = None
        """The masses of the variances, in the warm-up."""
        self._tensors: dict[dist.ProcessGroup, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """For each group of ranks, how many tensors it exchanges, and the places of this rank's parts of them
        among all of its parts, with the numbers of their tensors."""
        devices = [bucket.grad_data.device for _, seam in self._seams for bucket in seam.group.buckets]
        self._device = next(iter(devices), torch.device("cpu"))  # A fully frozen chunk has no buckets.
        self._held = torch.zeros(2, dtype=torch.int64)
        """This step's clamped elements, and those without variance, on this rank (update.held)."""

    @torch.no_grad()
    def step(self, original: Callable[[], StepResult]) -> StepResult:
        """Make the optimizer's step in either phase; `original` is Megatron's own step."""
        if self._sessions[0].active:
            with self._momentum_as_gradients() as new:
                agreement = self._look(new)
                if agreement is not None and agreement.overflows:
                    return False, None, None
                if agreement is not None:
                    settings = self._optimizer.config
                    if agreement.norm > getattr(settings, "grad_norm_skip_threshold", math.inf):
                        return False, agreement.norm, None
                    limit = settings.clip_grad
                    clip = min(1.0, limit / (agreement.norm + _NORM_EPS)) if limit > 0 else 1.0
                    return self._compressed_step(agreement, clip), agreement.norm, None
            self._begin_warm_up_again()
        self._begin_warm_up_step()
        result = original()
        self._end_warm_up_step(result[0])
        return result

    @torch.no_grad()
    def prepare(self, original: Callable[[], bool]) -> bool:
        """Make the first half of a step, `prepare_grads`, and return whether gradients overflowed.

        In the compressed phase the loop gets copies of this rank's own gradients, and the norm of their mean,
        so that it can clip between the halves.
        """
        self._ready = None
        if self._sessions[0].active:
            with self._momentum_as_gradients() as new:
                agreement = self._look(new)
            if agreement is not None:
                if not agreement.overflows:
                    self._ready = Prepared(self._optimizer, self._parts, agreement)
                return agreement.overflows
            self._begin_warm_up_again()
        return original()

    @torch.no_grad()
    def update(self, original: Callable[[], bool]) -> bool:
        """Make the second half, `step_with_ready_grads`, and return whether parameters were updated."""
        ready, self._ready = self._ready, None
        if ready is None:
            self._begin_warm_up_step()
            successful = original()
            self._end_warm_up_step(successful)
            return successful
        clip = self._model.reduce([ready.clipped_by()], dist.ReduceOp.MIN)[0]
        with self._momentum_as_gradients():
            return self._compressed_step(ready.agreement, clip)

    def _look(self, new: bool) -> Agreement | None:
        """Collect over all ranks what a compressed step needs; None if the variance is not the frozen one.

        Call it within `_momentum_as_gradients`; `new` says whether m was allocated there. It tells fp16's
        scalers whether gradients overflowed.
        """
        mine = [pair for part in self._parts for pair in _own(part)]
        known = [state for _, state in mine if {"exp_avg", "exp_avg_sq"} <= state.keys()]
        frozen_at = self._sessions[0].ledger.phase.variance_steps or 0
        holding = [part for part in self._parts if any(_own(part))]
        lost = len(known) < len(mine) or any(warm_up.adam_steps(part) < frozen_at for part in holding)
        unlike = torch.zeros((), dtype=torch.float64, device=self._device)
        held = variances = torch.zeros(0, dtype=torch.float64, device=self._device)
        if mine and not lost:
            held = _magnitudes([parameter.grad for parameter, _ in mine])
            kept = _magnitudes([state["exp_avg"] for state in known])
            unlike = ((held - kept).abs() > _UNLIKE * held).any().double()
            variances = _magnitudes([state["exp_avg_sq"] for state in known])
        if new:
            self._number_tensors()
        starved = self._starved(held, variances)
        norm, ranks_unlike, ranks_lost, total_variance = self._model.reduce(
            [self._squared_norm(), unlike, starved + lost, variances.sum()], dist.ReduceOp.SUM
        )
        if ranks_lost or not total_variance:
            return None
        scale = loss_scale(self._optimizer)
        norm = math.sqrt(norm) / scale if math.isfinite(norm) else math.nan
        if new:  # Even if this step is skipped: the next one finds m as it should be.
            self._take_moments()
        agreement = Agreement(norm, ranks_unlike > 0 and not new, scale)
        for part in self._leaves:
            if getattr(part, "grad_scaler", None) is not None:
                part.grad_scaler.update(agreement.overflows)
        return agreement

    def _starved(self, momenta: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
        """Return the number of tensors that have momentum but no variance, fp64 []. All ranks must call this.

        Args:
            momenta, variances: the L1 norms of this rank's parts of m and of v, fp64 [n], or [0] if they are
                lost.
        """
        starved = torch.zeros((), dtype=torch.float64, device=self._device)
        for group, (count, places, numbers) in self._tensors.items():
            total = torch.zeros(2, count, dtype=torch.float64, device=self._device)
            if len(momenta) and len(places):
                total.index_add_(1, numbers, torch.stack([momenta[places], variances[places]]))
            dist.all_reduce(total, group=group)
            starved += ((total[0] > 0) & (total[1] == 0)).sum()
        return starved

    def _number_tensors(self) -> None:
        """Number the tensors of each group of ranks, in their order in the momentum buffers.

        Call it within `_momentum_as_gradients`, where gradients are views of the buffers.
        """
        starts: dict[int, tuple[dist.ProcessGroup, int, list[int]]] = {}
        counts: dict[dist.ProcessGroup, int] = {}
        for momentum in self._momentum:
            for bucket, buffer in momentum.buffers():
                offsets = sorted(start for start, _ in bucket.param_to_index.values())
                count = counts.get(momentum.group, 0)
                starts[buffer.untyped_storage().data_ptr()] = momentum.group, count, offsets
                counts[momentum.group] = count + len(offsets)
        numbers: dict[dist.ProcessGroup, list[tuple[int, int]]] = {group: [] for group in counts}
        parts = (parameter.grad for part in self._parts for parameter, _ in _own(part))
        for place, part in enumerate(parts):
            group, count, offsets = starts[part.untyped_storage().data_ptr()]
            numbers[group].append((place, count + bisect.bisect(offsets, part.storage_offset()) - 1))
        self._tensors = {}
        for group, pairs in numbers.items():
            places, tensors = torch.tensor(pairs, dtype=torch.int64, device=self._device).view(-1, 2).T
            self._tensors[group] = counts[group], places, tensors

    def _compressed_step(self, agreement: Agreement, clip: float) -> bool:
        if agreement.restored:  # Errors belong to the momentum that was there.
            for session in self._sessions:
                session.clear_errors()
            self._take_moments()
        self._exchange(clip / agreement.scale)
        return self._update()

    def _squared_norm(self) -> torch.Tensor:
        """Return this rank's share of the mean gradient's squared norm, fp64 [], estimated to 4 %.

        It is NaN if a gradient of any rank is not finite. Parameters that several ranks of the model hold
        count once.
        """
        first = self._sessions[0]
        sketches: dict[dist.ProcessGroup, NormSketch] = {}
        for _, seam in self._seams:
            assert seam.momentum is not None
            group = seam.momentum.group
            seed = first.config.seed + first.ledger.steps_seen
            sketch = sketches.setdefault(group, NormSketch(seed, self._device))
            for bucket in seam.group.buckets:
                for parameter in bucket.params_list:
                    if _counts(parameter):
                        start, end = bucket.param_to_index[parameter]
                        sketch.add(bucket.grad_data[start:end], seam.momentum.mean_factor)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for group, sketch in sketches.items():
            total += sketch.squared_norm_of_mean(group) / group.size()
        return total

    def _exchange(self, factor: float) -> None:
        """Form this rank's momentum, and average it over the ranks by the low-bit all-reduce."""
        beta1 = self._optimizer.config.adam_beta1
        for session, seam in self._seams:
            assert seam.momentum is not None
            assert seam.momentum.held is not None
            (stage,) = seam.stages
            handles = []
            for place, (bucket, held) in enumerate(zip(seam.group.buckets, seam.momentum.held, strict=True)):
                update.form(held, bucket.grad_data, beta1, factor * seam.momentum.mean_factor)
                if stage.reduction.exchanges:
                    exchange = stage.reduction.exchanges[place]
                    handles.append(session.start(exchange, held, held, True, stage.group))
            with session.waiting():
                for handle in handles:
                    handle.wait()
            seam.momentum.clear_padding()
        for shared in self._copies or ():
            shared.average()

    def _update(self) -> bool:
        """Call Megatron's `step_with_ready_grads` with `_inner_step` in place of the inner Adam's step."""
        for part in self._parts:
            part.optimizer.step = functools.partial(self._inner_step, part)
        self._held = torch.zeros(2, dtype=torch.int64, device=self._device)
        try:
            return bool(self._optimizer.step_with_ready_grads())
        finally:
            for part in self._parts:
                del part.optimizer.step
            self._say_what_is_held()

    def _say_what_is_held(self) -> None:
        """Log, at some steps, how many elements are clamped or have no variance."""
        session = self._sessions[0]
        compressed_steps = session.ledger.steps + 1 - (session.ledger.phase.switch_step or 0)
        if compressed_steps not in _COUNTED_STEPS:
            return
        beyond, without = self._model.reduce(list(self._held), dist.ReduceOp.SUM)
        if (beyond or without) and dist.get_rank() == 0:
            logger.info(
                "megatron-loco: 1-bit Adam, step %d after the warm-up: %d elements are held to three "
                "times the largest step that Adam makes, %d had no gradient in the warm-up and stay",
                compressed_steps,
                beyond,
                without,
            )

    def _inner_step(self, part: Any) -> None:
        phase = self._sessions[0].ledger.phase
        assert phase.switch_step is not None
        assert phase.variance_steps is not None
        compressed_steps = self._sessions[0].ledger.steps + 1 - phase.switch_step
        variance_steps = phase.variance_steps
        for group in part.optimizer.param_groups:
            beta1, beta2 = group["betas"]
            if "step" in group:
                group["step"] = variance_steps
            updated = []
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                state = part.optimizer.state[parameter]
                if "step" in state:
                    state["step"].fill_(variance_steps)
                updated.append((parameter, parameter.grad, state["exp_avg_sq"], state["exp_avg"]))
            sizes = update.Sizes(
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                momentum_bias=1 - beta1 ** (variance_steps + compressed_steps),
                variance_bias=1 - beta2**variance_steps,
                most=update.most(beta1, beta2),
            )
            if compressed_steps in _COUNTED_STEPS:
                self._held = self._held + update.held(updated, sizes)
            update.update(updated, sizes)

    @contextmanager
    def _momentum_as_gradients(self) -> Iterator[bool]:
        """Within the block, the gradient of each of the optimizers' parameters is its part of m.

        Yields whether m was allocated just now.
        """
        new = any(momentum.held is None for momentum in self._momentum)
        gradients: dict[Any, torch.Tensor] = {}
        views: dict[Any, torch.Tensor] = {}
        for momentum in self._momentum:
            for parameter, view in momentum.views():
                gradients[parameter], views[parameter] = parameter.main_grad, view
                parameter.main_grad = view
        try:
            if new or self._copies is None:
                self._copies = list(find_replicas(self._chunks, views))
            _copy_gradients(self._parts)
            yield new
        finally:
            for parameter, gradient in gradients.items():
                parameter.main_grad = gradient
            for part in self._parts:
                part.zero_grad()

    def _take_moments(self) -> None:
        """Copy Adam's momentum to m: after the warm-up, a loaded checkpoint or a rollback they differ."""
        for part in self._parts:
            for parameter, state in _own(part):
                parameter.grad.copy_(state["exp_avg"])
        for momentum in self._momentum:
            momentum.gather()

    def _begin_warm_up_step(self) -> None:
        if not self._model.alone:  # Then the warm-up never ends.
            self._masses = self._masses or warm_up.Masses(self._parts)
            self._masses.begin_step()

    def _end_warm_up_step(self, successful: bool) -> None:
        first = self._sessions[0]
        if successful and self._masses is not None:
            self._masses.end_step()
        if not successful or first.ledger.phase.switch_step is not None or self._model.alone:
            return
        steps = first.ledger.steps + 1  # The current step is not counted yet.
        variance_steps = warm_up.over(
            first.ledger.phase, steps, first.config.warmup_steps, self._parts, self._model
        )
        if variance_steps is None:
            return
        assert self._masses is not None
        self._masses.make_equal(variance_steps)
        self._masses = None
        for session in self._sessions:
            session.ledger.phase.switch_step = session.ledger.steps + 1
            session.ledger.phase.variance_steps = variance_steps
        if dist.get_rank() == 0:
            logger.warning(
                "megatron-loco: 1-bit Adam's warm-up is over after %d steps (%s): the variance is frozen, "
                "and from now on momentum is exchanged in 1 bit instead of gradients",
                variance_steps - first.ledger.phase.warm_up_from,
                first.config.warmup,
            )

    @torch.no_grad()
    def leave(self) -> None:
        """Leave Adam's state to Megatron's own step, which corrects m by Adam's counter, without a bound."""
        phase, steps = self._sessions[0].ledger.phase, self._sessions[0].ledger.steps
        if not self._sessions[0].active or phase.switch_step is None or phase.variance_steps is None:
            return
        variance_steps = phase.variance_steps
        for part in self._parts:
            for group in part.optimizer.param_groups:
                beta1, beta2 = group["betas"]
                bias = 1 - beta1 ** (variance_steps + steps - phase.switch_step)
                for parameter in group["params"]:
                    state = part.optimizer.state.get(parameter, {})
                    if "exp_avg" in state:
                        size = (state["exp_avg_sq"] / (1 - beta2**variance_steps)).sqrt_().mul_(bias)
                        size.mul_(update.most(beta1, beta2))
                        state["exp_avg"].clamp_(-size, size).mul_((1 - beta1**variance_steps) / bias)

    def _begin_warm_up_again(self) -> None:
        counted = max(map(warm_up.adam_steps, self._parts), default=0)
        (steps,) = self._model.reduce([counted], dist.ReduceOp.MAX)
        for session in self._sessions:
            session.ledger.phase = Phase(warm_up_from=int(steps))
            session.clear_errors()
        for momentum in self._momentum:
            momentum.held = None
            momentum.reduce_gradients()
        if dist.get_rank() == 0:
            logger.warning(
                "megatron-loco: Adam's variance is not the one that was frozen (lost, of fewer steps, or "
                "zero in a tensor that gets gradients): 1-bit Adam begins a new warm-up, with gradients "
                "exchanged in full until it is over"
            )


def _counts(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank's copy of a parameter counts in norms, by Megatron's own conditions."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))


def _own(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the parameters of a Megatron optimizer that have gradients, each with its state of Adam."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.numel():
                yield parameter, part.optimizer.state.get(parameter, {})


def _copy_gradients(parts: Sequence[Any]) -> None:
    """Copy the `main_grad` of the model's parameters to the `grad` of the optimizers' parameters."""
    for part in parts:
        if isinstance(part, FP32Optimizer):
            part.prepare_grads()
        else:
            part._copy_model_grads_to_main_grads()


def _magnitudes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the L1 norm of each of n tensors, fp64 [n]."""
    return torch.stack(torch._foreach_norm(tensors, 1)).double()
