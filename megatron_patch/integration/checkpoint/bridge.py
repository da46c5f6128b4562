"""The checkpoint manager that Megatron-Bridge needed with release 0.2; Bridge's own one does today."""

from __future__ import annotations

import warnings
from typing import Any

from megatron.bridge.training import checkpointing


class CheckpointManager(checkpointing.DefaultCheckpointManager):
    """Megatron-Bridge's own manager under the name that release 0.2 had, with a DeprecationWarning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "megatron_patch.integration.checkpoint.bridge.CheckpointManager will be removed in 0.4: leave "
            "out custom_manager_class; Bridge's own manager saves the error states",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(*args, **kwargs)
