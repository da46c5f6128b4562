"""Observes the steps of torch's optimizers through torch's hooks, and the steps that a GradScaler skips.

torch.amp.GradScaler has no hooks: `step` and `update` are wrapped on its class while there is a listener.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_patch.session.session import Session

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Is told of the steps of all torch optimizers in this process."""

    def torch_step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """This is called before an optimizer's step."""

    def torch_step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """This is called after an optimizer has updated its parameters."""

    def rescaled(self, optimizers: list[Any], factor: float) -> None:
        """This is called after GradScaler.update has multiplied its scale by `factor`; GradScaler.step was
        called for `optimizers` since the last update."""


UNSEEN = 500
"""After this many exchanges without an optimizer's step a warning is logged."""
_SCALED = "_megatron_loco_optimizers"
"""The attribute of a GradScaler with the optimizers that it was asked to step since its last update."""
_listeners: list[Listener] = []
_hooks: list[RemovableHandle] = []
_scaler_methods: dict[str, Callable[..., Any]] = {}


def listen(listener: Listener) -> None:
    """Tell `listener` of every step from now on; a second call has no effect."""
    if listener not in _listeners:
        _listeners.append(listener)
    if _hooks:
        return
    _hooks.append(register_optimizer_step_pre_hook(_begins))
    _hooks.append(register_optimizer_step_post_hook(_ended))
    _scaler_methods.update(step=GradScaler.step, update=GradScaler.update)
    GradScaler.step = _noting(GradScaler.step)  # type: ignore[method-assign]
    GradScaler.update = _telling(GradScaler.update)  # type: ignore[method-assign]


def stop_listening(listener: Listener) -> None:
    """Undo `listen`; without listeners, torch's hooks and methods are restored."""
    if listener in _listeners:
        _listeners.remove(listener)
    if _listeners:
        return
    while _hooks:
        _hooks.pop().remove()
    for name, method in _scaler_methods.items():
        setattr(GradScaler, name, method)
    _scaler_methods.clear()


def exchange_begins(session: Session, part: object) -> None:
    """Note that torch exchanges the gradients of a part of the model, which is equal in each pass.

    The part that was exchanged first begins a pass, in which ranks agree whether to compress: a rank whose
    optimizer has none of the model's parameters sees no steps, and must ask when the others do. After UNSEEN
    exchanges without an optimizer step a warning is logged.
    """
    session.exchange_begins(1, rerun=False)
    if session.first_part is None:
        session.first_part = part
    if session.first_part == part:
        session.agree()
    session.exchanges_unseen += not session.ended_steps
    if session.exchanges_unseen == UNSEEN and session.announces and session.config.compresses:
        logger.warning(
            "megatron-loco: no step of a torch.optim.Optimizer was seen in %d exchanges, and start_step auto "
            "waits for one: start_step=0 compresses at once",
            UNSEEN,
        )


def learning_rates(optimizer: Any) -> list[float]:
    return [float(group.get("lr") or 0.0) for group in optimizer.param_groups]


def _begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in _listeners:
        listener.torch_step_begins(optimizer)


def _ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in _listeners:
        listener.torch_step_ended(optimizer)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault(_SCALED, []).append(optimizer)
        return original(self, optimizer, *args, **kwargs)

    return step


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.get_scale()
        original(self, *args, **kwargs)
        for listener in _listeners:
            listener.rescaled(vars(self).get(_SCALED, []), self.get_scale() / before)
        vars(self).pop(_SCALED, None)

    return update
