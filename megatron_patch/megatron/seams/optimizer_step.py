"""Seam: wraps the steps of optimizers, and reports them to the sessions whose parameters they update.

Megatron's optimizers update weights in two calls, `prepare_grads()`, which copies and unscales gradients and
finds overflows, and `step_with_ready_grads()`; `step()` makes both, with clipping in between. The outermost
call is the step: `step` of a chain (which get_megatron_optimizer returns) or of a single optimizer, or the
two halves, as MimoOptimizer and other loops call them. The methods are wrapped on their classes, because
optimizers are built long after `attach`; Megatron's loop, schedule and arithmetic are not changed. Other
torch optimizers are observed by torch's global hooks, and their steps are not changed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron_patch.megatron import patching, symbols
from megatron_patch.session import torch_steps


class Stepper(Protocol):
    """Makes the outermost steps of all Megatron optimizers in this process, and is told when steps end.

    `original` is Megatron's own method with its arguments bound. `loss_scale_factor` is the factor by which
    the step changed fp16's loss scale (1.0 without a loss scale).
    """

    def step(self, optimizer: Any, original: Callable[[], Any]) -> Any:
        """Make a whole step, and return what `original` would: (successful, grad_norm, zeros)."""

    def prepare(self, optimizer: Any, original: Callable[[], bool]) -> bool:
        """Make the first half of a step, and return whether it found an overflow, which ends the step."""

    def update(self, optimizer: Any, original: Callable[[], bool]) -> bool:
        """Make the second half of a step, and return whether parameters were updated."""

    def other_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer that is not Megatron's begins its step."""

    def prepared(self, optimizer: Any, loss_scale_factor: float) -> None:
        """Called when the first half of a step has ended without an overflow."""

    def ended(self, optimizer: Any, successful: bool, loss_scale_factor: float) -> None:
        """Called when a step has ended, successful or not."""


_in_step = False
"""Whether a step of a Megatron optimizer is running; the steps of inner optimizers are parts of it."""


def updates(optimizer: Any, chunk: Any) -> bool:
    """Whether an optimizer updates parameters of a wrapped model chunk, on this rank or others.

    A layer-wise optimizer may own none of a chunk's parameters on some ranks, but it lists its chunks. A
    fully frozen chunk is stepped by Megatron's stub optimizer, which holds no parameters.
    """
    leaves = leaves_of(optimizer)
    mine = getattr(chunk, "param_to_bucket_group", None)
    if mine is None:  # Megatron's FSDPs
        mine = set(chunk.parameters())
    if not mine and any(getattr(leaf, "is_stub_optimizer", False) for leaf in leaves):
        return True
    return any(
        any(known is chunk for known in getattr(part, "model_chunks", []))
        or any(parameter in mine for parameter in model_parameters(part))
        for part in [optimizer, *leaves]
    )


def leaves_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that a chained optimizer steps, nested ones too, or the optimizer itself."""
    parts = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if parts is None else [leaf for part in parts for leaf in leaves_of(part)]


def distributed_leaves(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers that have parameters on this rank."""
    return [leaf for leaf in leaves_of(optimizer) if not getattr(leaf, "is_stub_optimizer", False)]


Masters = dict[torch.nn.Parameter, tuple[torch.Tensor, int]]
"""The fp32 weights that this rank's optimizer updates of each model parameter, and where in its bucket they
begin."""


def masters_of(optimizer: Any) -> Masters:
    """Return the fp32 weights that a Megatron optimizer updates on this rank."""
    return {
        parameter: (
            leaf.optimizer.param_groups[place[0]]["params"][place[1]],
            ranges["gbuf_world_in_bucket"].start,
        )
        for leaf in distributed_leaves(optimizer)
        for of_buffer in leaf.gbuf_ranges
        for buckets in of_buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
        for place in [leaf.model_param_group_index_map[parameter]]
    }


def model_parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """Return the model parameters that a replicated optimizer updates; a distributed one lists its chunks."""
    if isinstance(part, torch.optim.Optimizer):
        groups = [group["params"] for group in part.param_groups]
    elif hasattr(part, "float16_groups"):  # The param_groups of such an optimizer hold fp32 copies.
        groups = part.float16_groups + part.fp32_from_fp32_groups
    elif isinstance(part, FP32Optimizer) and part.optimizer is not None:
        groups = [group["params"] for group in part.optimizer.param_groups]
    else:
        groups = []
    return itertools.chain.from_iterable(groups)


def learning_rates(optimizer: Any) -> list[float]:
    """Return the learning rates of the parameter groups, in their order, which all ranks share."""
    return [rate for part in leaves_of(optimizer) for rate in torch_steps.learning_rates(part)]


def loss_scale(optimizer: Any) -> float:
    """Return the loss scale of the next backward pass; 1.0 without a gradient scaler (bf16, fp32)."""
    if not any(getattr(part, "grad_scaler", None) is not None for part in leaves_of(optimizer)):
        return 1.0
    return float(optimizer.get_loss_scale())


def listen(stepper: Stepper) -> None:
    """Have `stepper` make every step of a Megatron optimizer, and tell it of other optimizers' steps.

    It holds for this process until `stop_listening`.
    """

    def whole(optimizer: Any, original: Callable[[], Any]) -> Any:
        before = loss_scale(optimizer)
        result = stepper.step(optimizer, original)
        stepper.ended(optimizer, bool(result[0]), loss_scale(optimizer) / before)
        return result

    def first_half(optimizer: Any, original: Callable[[], bool]) -> bool:
        before = loss_scale(optimizer)
        overflow = stepper.prepare(optimizer, original)
        factor = loss_scale(optimizer) / before
        if overflow:
            stepper.ended(optimizer, False, factor)
        else:
            stepper.prepared(optimizer, factor)
        return overflow

    def second_half(optimizer: Any, original: Callable[[], bool]) -> bool:
        successful = stepper.update(optimizer, original)
        stepper.ended(optimizer, bool(successful), 1.0)
        return successful

    for paths, make in (
        (symbols.STEPS, whole),
        (symbols.PREPARES, first_half),
        (symbols.UPDATES, second_half),
    ):
        for path in paths:
            patching.replace(path, functools.partial(_outermost, make))

    _torch.stepper = stepper
    torch_steps.listen(_torch)


class _TorchSteps:
    """Reports torch optimizers' steps that are not inside a Megatron step (torch_steps.Listener)."""

    stepper: Stepper

    def torch_step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not _in_step:
            self.stepper.other_begins(optimizer)

    def torch_step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if not _in_step:
            self.stepper.ended(optimizer, True, 1.0)

    def optimizer_clears(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: Megatron's gradients are in buffers, which `zero_grad_buffer` clears."""

    def module_clears(self, module: torch.nn.Module) -> None:
        """Nothing, for the same reason."""


_torch = _TorchSteps()


def _outermost(make: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `make`, or `original` if it is called within another such method."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _in_step
        if _in_step:
            return original(self, *args, **kwargs)
        _in_step = True
        try:
            return make(self, functools.partial(original, self, *args, **kwargs))
        finally:
            _in_step = False

    return method


def stop_listening() -> None:
    """Restore the optimizers' own methods."""
    patching.restore(*symbols.STEPS, *symbols.PREPARES, *symbols.UPDATES)
    torch_steps.stop_listening(_torch)
