"""The ways in for Megatron: `enable`, which `launch` calls too, and `attach`, also as a post-wrap hook.

All install the same things: the seams of what is attached (attach.py), the hooks that keep error states in
checkpoints (checkpoint/), and metrics in Megatron's own training loop (metrics.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.megatron import attach as attachments
from megatron_patch.megatron import patching, symbols, weight_metrics
from megatron_patch.megatron.checkpoint import training_loop as checkpoint
from megatron_patch.megatron.cpu import torch_adam
from megatron_patch.megatron.unsupported import MEGATRON_FSDP, fsdp_of, refuse_wrapper
from megatron_patch.session.report import show_log
from megatron_patch.session.session import Session


def enable(config: CompressionConfig | None = None) -> None:
    """Attach every Megatron DistributedDataParallel, and FSDP, that is built from now on.

    Enabling again replaces the options for models built later.

    Raises:
        UserError: `config` is no CompressionConfig.
    """
    options = _options(config, "enable")

    def attaching(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            attach(self, options)

        return __init__

    def refusing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if options.compresses or options.codes_weights:
                refuse_wrapper(self)
            original(self, *args, **kwargs)
            if fsdp_of(self) == MEGATRON_FSDP:  # whose class has another name in each release
                attach(self, options)

        return __init__

    show_log()
    checkpoint.install()
    patching.restore(*symbols.INITS, symbols.BASE_INIT)
    patching.replace(symbols.BASE_INIT, refusing)
    for path in symbols.INITS:
        patching.replace(path, attaching)


def attach(chunks: Any, config: CompressionConfig | None = None) -> None:
    """Compress the gradient exchange of DDP-wrapped model chunks: a list of them, or one.

    Raises:
        UserError: no such chunks, no CompressionConfig, or a configuration that cannot be served.
    """
    options, found = _options(config, "attach"), attachments.chunks_of(chunks, "attach")
    show_log()
    attachments.attach(found, options)
    checkpoint.install(loaded_only=True)
    _install_helpers()


def disable() -> None:
    """Undo `enable` and detach every model: Megatron's own exchange from the next step on."""
    patching.restore(*symbols.INITS, symbols.BASE_INIT)
    attachments.detach_all()
    checkpoint.uninstall()
    while _undo:
        _undo.pop()()


_undo: list[Callable[[], None]] = []
"""What `disable` calls. What `launch` has installed before stays."""


def _install_helpers() -> None:
    """The repairs of torch's Adam, and metrics where the job has loaded Megatron's own training loop."""
    if not patching.is_replaced(symbols.STATE_DICT):
        torch_adam.install()
        _undo.append(torch_adam.uninstall)
    if "megatron.training.training" in sys.modules and not patching.is_replaced(symbols.TRAIN_STEP):
        from megatron_patch.megatron.metrics import RunMetrics

        RunMetrics().install()
        _undo.append(RunMetrics.uninstall)


def sessions(model: Any = None) -> tuple[list[Session], Traffic]:
    """The sessions of attached chunks (all of them if None), and what gathered their weights in a step."""
    chunks = attachments.attached_chunks() if model is None else attachments.chunks_of(model, "report")
    found = [attachments.session_of(chunk) for chunk in chunks]
    states = [session for session in found if session is not None]
    return states, weight_metrics.sent(chunks) if states else Traffic()


def _options(config: CompressionConfig | None, door: str) -> CompressionConfig:
    if config is None:
        return CompressionConfig()
    if not isinstance(config, CompressionConfig):
        raise UserError(
            f"{door}(): the configuration is a {type(config).__name__}, not a CompressionConfig: "
            "megatron_patch.CompressionConfig(bits=4)"
        )
    return config
