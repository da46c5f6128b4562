"""1-bit Adam inside Megatron's optimizers: their step, once the warm-up is over.

    warm-up       Megatron's own step on reduced gradients; warm_up.py says which was the last
    from then on  bucket groups leave gradients unreduced (seams/gradients.py), finalize_model_grads works on
                  them as they are (it is linear), and `step` stands for the optimizer's:

      1  the norm of the mean gradient, over the whole job; NaN or Inf anywhere: nothing changes
      2  m_i = b1*m + (1-b1)*g_i, clipped by one factor; the low-bit all-reduce makes of them the shared m
      3  x <- x - lr*(m^/(sqrt(v^)+eps) + wd*x) where the inner Adam would step; Megatron's own
         `step_with_ready_grads` does the rest: copies to bf16, gathers of sharded weights

m is held whole on every rank, fp32, in the order of the gradient buffers. Adam's state stays Megatron's: v
is `exp_avg_sq`, and `exp_avg` is given its part of m in every step, so checkpoints, schedules and groups of
weight decay work as ever. Which part of m is whose, the optimizers say themselves: they "copy gradients" as
always while every parameter's `main_grad` is a view of m.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_patch.collectives.lost_ranks import naming_lost_ranks
from megatron_patch.integration import warm_up
from megatron_patch.integration.chunk import ChunkState
from megatron_patch.integration.onebit_adam import replicas, update
from megatron_patch.integration.onebit_adam.norm_sketch import NormSketch
from megatron_patch.integration.seams.gradients import BucketGroupSeam
from megatron_patch.integration.seams.optimizer_step import leaves_of, loss_scale
from megatron_patch.integration.unsupported import refuse_optimizer

logger = logging.getLogger(__name__)

StepResult = tuple[bool, float | None, int | None]
_NORM_EPS = 1e-6
"""Megatron's own, in clip_grad_by_total_norm_fp32."""


class OneBitAdam:
    """The momentum of the attached chunks that one Megatron optimizer updates.

    Args:
        optimizer: Megatron's, chained or not.
        attached: each DDP-wrapped chunk with its state and seams.

    Raises:
        UserError: an optimizer that is no Adam, or keeps its state where 1-bit Adam cannot go.
    """

    def __init__(
        self, optimizer: Any, attached: Sequence[tuple[Any, ChunkState, Sequence[BucketGroupSeam]]]
    ) -> None:
        self._optimizer = optimizer
        self._parts = [part for part in leaves_of(optimizer) if not getattr(part, "is_stub_optimizer", False)]
        for part in self._parts:
            refuse_optimizer(part)
        self._chunks = [chunk for chunk, _, _ in attached]
        self._states = [state for _, state, _ in attached]
        self._seams = [(state, seam) for _, state, seams in attached for seam in seams]
        self._momentum = [seam.momentum for _, seam in self._seams if seam.momentum is not None]
        self._copies: list[replicas.Replicas] = []

    def step(self, original: Callable[[], StepResult]) -> StepResult:
        """The optimizer's step in either phase; `original` is Megatron's own."""
        first = self._states[0]
        if first.active:
            return self._compressed_step()
        result = original()
        phase = first.phase
        if result[0] and phase.switch_step is None and warm_up.settled(phase, self._parts):
            for state in self._states:
                state.phase.switch_step = state.steps + 1  # this one is not counted yet
        return result

    @torch.no_grad()
    def _compressed_step(self) -> StepResult:
        scale = loss_scale(self._optimizer)
        norm = self._norm() / scale
        for part in self._parts:
            if getattr(part, "grad_scaler", None) is not None:
                part.grad_scaler.update(not math.isfinite(norm))
        if not math.isfinite(norm):
            return False, None, None
        if norm > getattr(self._optimizer.config, "grad_norm_skip_threshold", math.inf):
            return False, norm, None
        limit = self._optimizer.config.clip_grad
        clip = min(1.0, limit / (norm + _NORM_EPS)) if limit > 0 else 1.0
        with self._momentum_as_gradients():
            self._exchange(clip / scale)
            successful = self._update()
        return successful, norm, None

    def _norm(self) -> float:
        """The norm of the mean gradient over the whole job, estimated to 2 % (onebit_adam/norm_sketch.py).

        NaN where a gradient of any rank is not finite. What several ranks of the model hold counts once.
        """
        first = self._states[0]
        sketches: dict[dist.ProcessGroup, NormSketch] = {}
        with naming_lost_ranks("1-bit Adam's gradient norm"):
            for _, seam in self._seams:
                assert seam.momentum is not None
                group = seam.momentum.group
                seed = first.config.seed + first.steps_seen
                sketch = sketches.setdefault(group, NormSketch(seed, first.device))
                for bucket in seam.group.buckets:
                    for parameter in bucket.params_list:
                        if _counts(parameter):
                            sketch.add(parameter.main_grad, seam.momentum.mean_factor)
            total = torch.zeros((), dtype=torch.float64, device=first.device)
            for group, sketch in sketches.items():
                total += sketch.squared_norm_of_mean(group) / group.size()
            dist.all_reduce(total)
        return math.sqrt(total) if math.isfinite(total) else math.nan

    def _exchange(self, factor: float) -> None:
        """Form every rank's own momentum, and make it the shared one."""
        beta1 = self._optimizer.config.adam_beta1
        for state, seam in self._seams:
            assert seam.momentum is not None
            assert seam.momentum.held is not None
            (stage,) = seam.stages
            handles = []
            with naming_lost_ranks("momentum exchange", stage.group):
                for place, (bucket, held) in enumerate(
                    zip(seam.group.buckets, seam.momentum.held, strict=True)
                ):
                    update.form(held, bucket.grad_data, beta1, factor * seam.momentum.mean_factor)
                    if stage.made.exchanges:
                        exchange = stage.made.exchanges[place]
                        handles.append(state.start(exchange, held, held, True, stage.group))
                for handle in handles:
                    handle.wait()
            seam.momentum.clear_padding()
        for shared in self._copies:
            shared.average()

    def _update(self) -> bool:
        """Megatron's `step_with_ready_grads`, with ours where the inner Adam's step would be."""
        for part in self._parts:
            part.optimizer.step = functools.partial(self._inner_step, part)
        try:
            return bool(self._optimizer.step_with_ready_grads())
        finally:
            for part in self._parts:
                del part.optimizer.step

    def _inner_step(self, part: Any) -> None:
        variance_steps = self._states[0].phase.variance_steps
        assert variance_steps is not None
        steps = warm_up.adam_steps(part) + 1
        for group in part.optimizer.param_groups:
            beta1, beta2 = group["betas"]
            if "step" in group:
                group["step"] = steps
            updated = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = part.optimizer.state[parameter]
                if "step" in state:
                    state["step"].fill_(steps)
                updated.append((parameter, parameter.grad, state["exp_avg_sq"], state["exp_avg"]))
            sizes = update.Sizes(
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                momentum_bias=1 - beta1**steps,
                variance_bias=1 - beta2**variance_steps,
            )
            update.update(updated, sizes)

    @contextmanager
    def _momentum_as_gradients(self) -> Iterator[None]:
        """Within the block, each parameter of the optimizers has its part of m as its gradient."""
        new = any(momentum.held is None for momentum in self._momentum)
        gradients: dict[Any, torch.Tensor] = {}
        views: dict[Any, torch.Tensor] = {}
        for momentum in self._momentum:
            for parameter, view in momentum.views():
                gradients[parameter], views[parameter] = parameter.main_grad, view
                parameter.main_grad = view
        try:
            for part in self._parts:
                if isinstance(part, FP32Optimizer):
                    part.prepare_grads()
                else:
                    part._copy_model_grads_to_main_grads()
            if new:
                self._begin(views)
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.main_grad = gradient
            for part in self._parts:
                part.zero_grad()

    def _begin(self, views: dict[Any, torch.Tensor]) -> None:
        """The first step since the warm-up, or since a checkpoint was loaded: m is what Adam holds."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.copy_(part.optimizer.state[parameter]["exp_avg"])
        for momentum in self._momentum:
            momentum.gather()
        self._copies = list(replicas.find(self._chunks, views))
        if self._states[0].phase.variance_steps is None:
            self._announce_switch()

    def _announce_switch(self) -> None:
        steps = torch.tensor([max(map(warm_up.adam_steps, self._parts), default=0)], device="cpu")
        if "nccl" in dist.get_backend():
            steps = steps.cuda()
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        for state in self._states:
            state.phase.variance_steps = int(steps)
        if dist.get_rank() == 0:
            logger.warning(
                "megatron-loco: 1-bit Adam's warm-up is over after %d steps (%s): the variance is frozen, "
                "and from now on momentum is exchanged in 1 bit instead of gradients",
                int(steps),
                self._states[0].config.warmup,
            )


def _counts(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank's copy of a parameter is the one that counts in norms: Megatron's own conditions."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))
