"""Observes what a training loop does with torch's optimizers, gradients and loss scalers.

Steps are observed through torch's hooks. torch has none for clearing gradients and for scaling a loss:
`zero_grad` of optimizers and modules, and `scale` of gradient scalers, are wrapped on their classes while
there is a listener.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """Is told of the steps of all torch optimizers in this process."""

    def torch_step_begins(self, optimizer: Optimizer) -> None:
        """This is called before an optimizer's step."""

    def torch_step_ended(self, optimizer: Optimizer) -> None:
        """This is called after an optimizer has updated its parameters."""

    def optimizer_clears(self, optimizer: Optimizer) -> None:
        """This is called when an optimizer clears the gradients of its parameters."""

    def module_clears(self, module: nn.Module) -> None:
        """This is called when a module clears the gradients of its parameters."""


_listeners: list[Listener] = []
_hooks: list[RemovableHandle] = []
_originals: list[tuple[type, str, Callable[..., Any]]] = []


class _Scales:
    """The scales of scaled losses, fp32 []."""

    now: torch.Tensor | None = None
    """The scale of the backward pass that runs now."""
    last: torch.Tensor | None = None
    """The scale of the last one, until an optimizer steps, if no gradient was exchanged within it."""


def listen(listener: Listener) -> None:
    """Tell `listener` of everything from now on; a second call has no effect."""
    if listener not in _listeners:
        _listeners.append(listener)
    if _hooks:
        return
    _hooks.append(register_optimizer_step_pre_hook(_begins))
    _hooks.append(register_optimizer_step_post_hook(_ended))
    _wrap(Optimizer, "zero_grad", _telling("optimizer_clears"))
    _wrap(nn.Module, "zero_grad", _telling("module_clears"))
    _wrap(GradScaler, "scale", _noting_scale)
    _wrap(ShardedGradScaler, "scale", _noting_scale)


def stop_listening(listener: Listener) -> None:
    """Undo `listen`; without listeners, torch's hooks and methods are restored."""
    if listener in _listeners:
        _listeners.remove(listener)
    if _listeners:
        return
    while _hooks:
        _hooks.pop().remove()
    while _originals:
        setattr(*_originals.pop())


def loss_scale() -> torch.Tensor | None:
    """Return the scale that a GradScaler has given the loss of the running backward pass, fp32 [].

    Without overlap Megatron exchanges gradients after the backward pass, whose scale it then is. It is on the
    device: no read waits for it.
    """
    if torch._C._current_graph_task_id() == -1:
        return _Scales.last
    _Scales.last = None
    return _Scales.now


def learning_rates(optimizer: Any) -> list[float]:
    """Return the rates of the parameter groups; an optimizer that sets its own (None) has a constant one."""
    rates = (group.get("lr") for group in getattr(optimizer, "param_groups", ()))
    return [1.0 if rate is None else float(rate) for rate in rates]


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _originals.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _begins(optimizer: Optimizer, *_: Any) -> None:
    for listener in _listeners:
        listener.torch_step_begins(optimizer)


def _ended(optimizer: Optimizer, *_: Any) -> None:
    _Scales.now = _Scales.last = None  # It is still set after a backward pass that has failed.
    for listener in _listeners:
        listener.torch_step_ended(optimizer)


def _telling(event: str) -> Any:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in _listeners:
                getattr(listener, event)(self)
            return original(self, *args, **kwargs)

        return zero_grad

    return wrapper


def _noting_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        scale = self._get_scale_async() if self.is_enabled() else None
        if scale is None:  # It has scaled nothing yet.
            return scaled
        scale = scale.clone()  # `update` changes it in place.

        def begins(_: torch.Tensor) -> None:
            """Note the scale when the loss's backward pass begins, and forget it when it is over."""
            _Scales.now = _Scales.last = scale
            # Callbacks run in their order: FSDP2 exchanges in one that may be behind the first of these.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(_forget))

        for loss in scaled if isinstance(scaled, list | tuple) else [scaled]:
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(begins)
        return scaled

    return scale


def _forget() -> None:
    _Scales.now = None
