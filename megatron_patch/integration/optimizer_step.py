"""How a step ended: Megatron's optimizers tell the compressors of their model chunks.

`MegatronOptimizer.step()` returns (successful, grad_norm, zeros). The outermost step of a training
iteration is ChainedOptimizer's (what get_megatron_optimizer returns), or DistributedOptimizer's own, which it
inherits from MixedPrecisionOptimizer: those two methods are wrapped on their classes, since optimizers are
built long after `attach`. Upstream's loop, schedule and arithmetic stay untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

StepListener = Callable[[list[Any], bool, float], None]
"""Called with the optimizer's model chunks, whether the step succeeded, and the factor by which it changed
the loss scale (1.0 without one: bf16, fp32)."""

_CLASSES = (ChainedOptimizer, MixedPrecisionOptimizer)
_MARK = "_megatron_loco_original"


def model_chunks(optimizer: Any) -> list[Any]:
    """The DDP-wrapped model chunks that a Megatron optimizer updates, each once."""
    found: list[Any] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for chunk in getattr(part, "model_chunks", []):
            if not any(chunk is other for other in found):
                found.append(chunk)
    return found


def _loss_scale(optimizer: Any) -> float:
    """The loss scale of the next backward pass; 1.0 without a gradient scaler (bf16, fp32)."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if not any(getattr(part, "grad_scaler", None) is not None for part in parts):
        return 1.0
    return float(optimizer.get_loss_scale())


def listen(listener: StepListener) -> None:
    """Have `listener` called after every step of a Megatron optimizer in this process. Idempotent."""
    for cls in _CLASSES:
        if hasattr(cls.step, _MARK):
            continue
        original = cls.step

        def step(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            before = _loss_scale(self)
            result = _original(self, *args, **kwargs)
            listener(model_chunks(self), bool(result[0]), _loss_scale(self) / before)
            return result

        wrapped = functools.wraps(original)(step)
        setattr(wrapped, _MARK, original)
        cls.step = wrapped


def stop_listening() -> None:
    """Give the optimizers their own `step` back."""
    for cls in _CLASSES:
        original = getattr(cls.step, _MARK, None)
        if original is not None:
            cls.step = original
