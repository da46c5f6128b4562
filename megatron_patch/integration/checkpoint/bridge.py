"""What Megatron-Bridge's configuration had to name with release 0.2: its stock manager needs no help now."""

from __future__ import annotations

import warnings
from typing import Any

from megatron.bridge.training import checkpointing


class CheckpointManager(checkpointing.DefaultCheckpointManager):
    """Bridge's own manager."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "megatron_patch.integration.checkpoint.bridge.CheckpointManager will be removed in 0.4: leave "
            "out custom_manager_class; Bridge's own manager saves the error states",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(*args, **kwargs)
