"""How a step ended: optimizers tell the states of the model chunks whose parameters they update.

`MegatronOptimizer.step()` returns (successful, grad_norm, zeros). The outermost step of a training
iteration is ChainedOptimizer's (what get_megatron_optimizer returns), or that of a single optimizer, which
has it from MixedPrecisionOptimizer (DistributedOptimizer too) or FP32Optimizer: those methods are wrapped on
their classes, since optimizers are built long after `attach`. Upstream's loop, schedule and arithmetic stay
untouched. Other optimizers of torch tell by the hook that torch has for all of them; what they step is not
changed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from megatron_patch.integration import patching, symbols

StepListener = Callable[[Any, bool, float], None]
"""Called after an outermost step with the optimizer, whether the step succeeded, and the factor by which it
changed the loss scale (1.0 without one: bf16, fp32)."""

Stepper = Callable[[Any, Callable[[], Any]], Any]
"""Called with the optimizer and its own step; returns what that would."""

_STEPS = (symbols.CHAINED_STEP, symbols.MIXED_PRECISION_STEP, symbols.FP32_STEP)
_torch_hook: RemovableHandle | None = None
_in_step = False
"""Within a step of a Megatron optimizer: the steps of those inside it are parts of it."""


def updates(optimizer: Any, chunk: Any) -> bool:
    """Whether an optimizer updates parameters of a DDP-wrapped model chunk, on this rank or others.

    A layer-wise optimizer may own none of a chunk's parameters on some ranks: it knows its chunks.
    """
    return any(
        any(known is chunk for known in getattr(part, "model_chunks", []))
        or any(parameter in chunk.param_to_bucket_group for parameter in _model_parameters(part))
        for part in [optimizer, *leaves_of(optimizer)]
    )


def leaves_of(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one steps, or the optimizer itself; a layer-wise one is a chain in a
    chain."""
    parts = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if parts is None else [leaf for part in parts for leaf in leaves_of(part)]


def _model_parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """The model's parameters that a replicated optimizer updates (a distributed one knows its chunks)."""
    if isinstance(part, torch.optim.Optimizer):
        groups = [group["params"] for group in part.param_groups]
    elif hasattr(part, "float16_groups"):  # its param_groups hold fp32 copies
        groups = part.float16_groups + part.fp32_from_fp32_groups
    elif isinstance(part, FP32Optimizer) and part.optimizer is not None:
        groups = [group["params"] for group in part.optimizer.param_groups]
    else:
        groups = []
    return itertools.chain.from_iterable(groups)


def learning_rates(optimizer: Any) -> list[float]:
    """Of its parameter groups, in their order, which is that of all ranks."""
    groups = (group for part in leaves_of(optimizer) for group in part.param_groups)
    return [float(group.get("lr", 0.0)) for group in groups]


def loss_scale(optimizer: Any) -> float:
    """The loss scale of the next backward pass; 1.0 without a gradient scaler (bf16, fp32)."""
    if not any(getattr(part, "grad_scaler", None) is not None for part in leaves_of(optimizer)):
        return 1.0
    return float(optimizer.get_loss_scale())


def listen(listener: StepListener, stepper: Stepper) -> None:
    """Have `stepper` make every step of a Megatron optimizer in this process, and `listener` hear of its end
    and of other optimizers' steps.

    Idempotent.
    """
    global _torch_hook

    def heard(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            global _in_step
            if _in_step:
                return original(self, *args, **kwargs)
            before, _in_step = loss_scale(self), True
            try:
                result = stepper(self, functools.partial(original, self, *args, **kwargs))
            finally:
                _in_step = False
            listener(self, bool(result[0]), loss_scale(self) / before)
            return result

        return step

    def heard_of(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not _in_step:
            listener(optimizer, True, 1.0)

    for path in _STEPS:
        patching.replace(path, heard)
    if _torch_hook is None:
        _torch_hook = register_optimizer_step_post_hook(heard_of)


def stop_listening() -> None:
    """Give the optimizers their own `step` back."""
    global _torch_hook
    patching.restore(*_STEPS)
    if _torch_hook is not None:
        _torch_hook.remove()
        _torch_hook = None
