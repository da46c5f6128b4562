"""Low-bit gradient communication for Megatron pretraining.

    import megatron_patch
    megatron_patch.enable(megatron_patch.CompressionConfig(method="loco", bits=4))

before the model is built, or `attach(model_chunks, config)` after it is wrapped in Megatron's
DistributedDataParallel. Importing this package changes nothing and does not import Megatron.
"""

from __future__ import annotations

from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError

__version__ = "0.1.0"
__all__ = ["CompressionConfig", "UserError", "attach", "disable", "enable"]


def enable(config: CompressionConfig | None = None) -> None:
    """Compress the gradients of every Megatron DistributedDataParallel built from now on."""
    from megatron_patch.integration import attach as seam
    from megatron_patch.integration.checkpoint import hooks as checkpoint

    seam.enable(config)
    checkpoint.install_where_present()


def disable() -> None:
    """Undo `enable` and detach every model: Megatron's own exchange from the next step on."""
    from megatron_patch.integration import attach as seam
    from megatron_patch.integration.checkpoint import hooks as checkpoint

    seam.disable()
    checkpoint.uninstall()


def attach(chunks: Any, config: CompressionConfig | None = None) -> Any:
    """Compress the gradients of DDP-wrapped model chunks; returns them (a post-wrap hook).

    Raises:
        UserError: a configuration that compression cannot serve.
    """
    from megatron_patch.integration import attach as seam
    from megatron_patch.integration.checkpoint import hooks as checkpoint

    checkpoint.install_where_present(loaded_only=True)
    return seam.attach(chunks, config)
