"""Error states in the checkpoints of Megatron-Bridge: a checkpoint manager for its `custom_manager_class`.

    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    register_allowed_target_prefix("megatron_patch.")
    cfg.checkpoint.custom_manager_class = "megatron_patch.integration.checkpoint.bridge.CheckpointManager"

The states lie in the checkpoint's own folder, in the same files as in Megatron's checkpoints (save.py):
written into a staging folder first, moved into the checkpoint's once Bridge has written it. Bridge's
non-persistent checkpoints hold none, nor those of object stores (`msc://`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.bridge.training import checkpointing
from megatron.bridge.training.utils.checkpoint_utils import get_checkpoint_name

from megatron_patch.integration.checkpoint.hooks import saves_states
from megatron_patch.integration.checkpoint.restore import Checkpoint, restore
from megatron_patch.integration.checkpoint.save import ErrorSave
from megatron_patch.integration.checkpoint.sharded_state import compressed


class CheckpointManager(checkpointing.DefaultCheckpointManager):
    """Bridge's own manager, and the error states of attached chunks with it."""

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Bridge's checkpoint, with the states. Call on all ranks.

        Raises:
            UserError: on every rank, where the states cannot be written.
        """
        chunks = compressed(ctx.model)
        folder = None if ctx.non_persistent_ckpt else _folder(ctx.state.cfg.checkpoint.save, ctx.state)
        if not chunks or folder is None:
            super().save(ctx, callback_manager)
            return
        saving = ErrorSave(chunks, folder, ctx.state.train_state.step, ctx.optimizer)
        saving.write()
        saving.complete()
        try:
            with saves_states():
                super().save(ctx, callback_manager)
        except BaseException:
            saving.discard()
            raise
        if dist.get_rank() == 0:
            saving.publish()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Bridge's checkpoint, and the states; one line in the log says how it went. Call on all ranks.

        Raises:
            UserError: on every rank, for a damaged state with `strict_load`.
        """
        iteration, operations = super().load(ctx)
        chunks = compressed(ctx.model)
        if chunks and iteration and not ctx.skip_load_to_model_and_opt:
            folder = _folder(ctx.state.cfg.checkpoint.load, ctx.state)
            restore(chunks, Checkpoint(folder, iteration), ctx.optimizer)
        return iteration, operations


def _folder(base: str | None, state: Any) -> Path | None:
    """The folder of the checkpoint of a step; None where it is no folder."""
    if base is None or "://" in base:
        return None
    return Path(get_checkpoint_name(base, state.train_state.step, release=False))
