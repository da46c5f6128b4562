"""The public functions for Megatron: `enable`, which `launch` also calls, `attach` and `disable`.

They install the seams of attached models (attach.py), the hooks that keep error states in checkpoints
(checkpoint/), and metrics in Megatron's training loop (metrics.py). `attach` may serve as post-wrap hook.
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
    """Attach every DistributedDataParallel and FSDP that Megatron builds from now on.

    A second call replaces the options for models that are built later.

    Raises:
        UserError: `config` is not a CompressionConfig.
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
            if options.compresses or options.codes_weights or options.outer_steps:
                refuse_wrapper(self)
            original(self, *args, **kwargs)
            if fsdp_of(self) == MEGATRON_FSDP:  # The name of its class differs between releases.
                attach(self, options)

        return __init__

    show_log()
    checkpoint.install()
    patching.restore(*symbols.INITS, symbols.BASE_INIT)
    patching.replace(symbols.BASE_INIT, refusing)
    for path in symbols.INITS:
        patching.replace(path, attaching)


def attach(chunks: Any, config: CompressionConfig | None = None) -> None:
    """Compress the gradient exchange of wrapped model chunks: a list of them, or a single one.

    Raises:
        UserError: `chunks` are not wrapped by Megatron, `config` is not a CompressionConfig, or the
            configuration cannot be served.
    """
    options, wrapped = _options(config, "attach"), attachments.chunks_of(chunks, "attach")
    show_log()
    attachments.attach(wrapped, options)
    checkpoint.install(loaded_only=True)
    _install_helpers()


def disable() -> None:
    """Undo `enable` and detach every model: from the next step on, Megatron's own exchanges run again."""
    patching.restore(*symbols.INITS, symbols.BASE_INIT)
    attachments.detach_all()
    checkpoint.uninstall()
    while _undo:
        _undo.pop()()


_undo: list[Callable[[], None]] = []
"""The functions that `disable` calls to uninstall; what `launch` installed before is not among them."""


def _install_helpers() -> None:
    """Install the repairs of torch's Adam, and metrics if the job has loaded Megatron's training loop."""
    if not patching.is_replaced(symbols.STATE_DICT):
        torch_adam.install()
        _undo.append(torch_adam.uninstall)
    if "megatron.training.training" in sys.modules and not patching.is_replaced(symbols.TRAIN_STEP):
        from megatron_patch.megatron.metrics import RunMetrics

        RunMetrics().install()
        _undo.append(RunMetrics.uninstall)


def sessions(model: Any = None) -> tuple[list[Session], Traffic]:
    """Return the sessions of a model's attached chunks (None: of all), and their weight gathers' traffic."""
    chunks = attachments.attached_chunks() if model is None else attachments.chunks_of(model, "report")
    attached = [session for chunk in chunks if (session := attachments.session_of(chunk)) is not None]
    return attached, weight_metrics.sent(chunks) if attached else Traffic()


def _options(config: CompressionConfig | None, door: str) -> CompressionConfig:
    if config is None:
        return CompressionConfig()
    if not isinstance(config, CompressionConfig):
        raise UserError(
            f"{door}(): the configuration is a {type(config).__name__}, not a CompressionConfig: "
            "megatron_patch.CompressionConfig(bits=4)"
        )
    return config
