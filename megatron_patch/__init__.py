"""Low-bit gradient communication for Megatron pretraining.

    import megatron_patch
    megatron_patch.enable(megatron_patch.CompressionConfig(method="loco", bits=4))

Call `enable` before the model is built, or `attach(model_chunks, config)` after it is wrapped in Megatron's
DistributedDataParallel. Importing this package changes nothing and does not import Megatron.

The names in `__all__` are public and follow semantic versioning (docs/api.md).
"""

from __future__ import annotations

from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.registry import register_codec, register_exchange
from megatron_patch.releases import refuse_old_torch
from megatron_patch.step_report import StepReport

__version__ = "0.3.0.dev0"
__all__ = [
    "CompressionConfig",
    "StepReport",
    "UserError",
    "attach",
    "disable",
    "enable",
    "load_state_dict",
    "offload",
    "register_codec",
    "register_exchange",
    "reload",
    "report",
    "skip_step",
    "state_dict",
]


def enable(config: CompressionConfig | None = None) -> None:
    """Compress the gradients of every Megatron DistributedDataParallel built from now on.

    Args:
        config: the options; CompressionConfig() if None.

    Raises:
        UserError: `config` is no CompressionConfig. A model that is not supported raises it when it is built.
    """
    refuse_old_torch()  # Megatron may not even load with one.
    from megatron_patch.megatron import doors

    doors.enable(config)


def disable() -> None:
    """Undo `enable` and detach every model, which uses its own gradient exchange from the next step on."""
    from megatron_patch import doors

    doors.disable()


def attach[Chunks](
    chunks: Chunks, config: CompressionConfig | None = None, replicate_group: Any = None
) -> Chunks:
    """Compress the gradients of a wrapped or sharded model; returns `chunks`, so it can be a post-wrap hook.

    Args:
        chunks: Megatron's DistributedDataParallel, or a list of them; or a module that torch's `fully_shard`
            was applied to (FSDP2), or a list of such parts of a model.
        config: the options; CompressionConfig() if None.
        replicate_group: with FSDP2 over a mesh of one dimension, the torch.distributed.ProcessGroup of the
            ranks that hold the same shards: gradients are averaged over it in low bits, and FSDP2's own
            exchange stays as it is. Leave it out with a mesh of two dimensions, which has this group.

    Raises:
        UserError: `chunks` is no such model, `config` is no CompressionConfig, or the model or the options
            are not supported.
    """
    from megatron_patch import doors

    doors.attach(chunks, config, replicate_group)
    return chunks


def report(model: Any = None) -> StepReport:
    """Report what this rank sent in its last optimizer step; any rank may call it, without communication.

    Args:
        model: an attached model; all attached models if None.

    Raises:
        UserError: nothing is attached, no step has ended yet, or `model` is None and attached models have
            different options.
    """
    from megatron_patch import doors

    return doors.report(model)


def skip_step(model: Any = None) -> None:
    """Report that no optimizer step uses the last gradients, so that their rounding errors go with them.

    Steps that a scaler or an optimizer skips, and gradients that `zero_grad` clears, are noticed without this
    call. It is for loops that clear gradients otherwise (`parameter.grad = None`), or that put weights and
    optimizer back to an earlier state: then call it after putting them back. All ranks should call it.

    Args:
        model: an attached model; all attached models if None.

    Raises:
        UserError: the model is not attached.
    """
    from megatron_patch import doors

    doors.skip_step(model)


def offload(model: Any = None) -> None:
    """Move what compression keeps on the GPU between steps to host memory, and free its payload buffers.

    This is for engines that use the GPU for something else between steps. It moves error states, the exact
    gather's old shards and messages, and 1-bit Adam's momentum. `reload` brings them back bit for bit; so do
    the next exchange, weight gather or checkpoint. `report().device_bytes` is the memory still on the GPU.

    Args:
        model: an attached model; all attached models if None.

    Raises:
        UserError: the model is not attached, or gradients were exchanged that no optimizer step has used yet.
    """
    from megatron_patch import doors

    doors.offload(model)


def reload(model: Any = None) -> None:
    """Move what `offload` has moved back to the GPU.

    Raises:
        UserError: the model is not attached.
    """
    from megatron_patch import doors

    doors.reload(model)


def state_dict(
    model: Any, optimizer: Any = None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """Return error states for torch.distributed.checkpoint (docs/checkpoints.md). All ranks must call it.

    Args:
        model: an attached model.
        optimizer: Megatron's optimizer, needed with fp16.
        reader: a dcp.StorageReader of the checkpoint to load, whatever layout of ranks has saved it.
        path: the keys of this model's states in that checkpoint, joined by dots; needed if the checkpoint
            has the states of several models.

    Raises:
        UserError: the reader's checkpoint has no error states at `path`, or they are damaged.
    """
    from megatron_patch import doors

    return doors.state_dict(model, optimizer, reader, path)


def load_state_dict(model: Any, state: dict[str, Any], optimizer: Any = None) -> None:
    """Restore error states that torch.distributed.checkpoint.load has read. All ranks must call it.

    Args:
        model: an attached model.
        state: what `state_dict` has returned, filled in.
        optimizer: as of `state_dict`; or torch's GradScaler, where one scales a model's loss.

    Raises:
        UserError: `state` does not come from `state_dict`, or is damaged.
    """
    from megatron_patch import doors

    doors.load_state_dict(model, state, optimizer)
