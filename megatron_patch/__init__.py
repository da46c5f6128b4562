"""Low-bit gradient communication for Megatron pretraining.

    import megatron_patch
    megatron_patch.enable(megatron_patch.CompressionConfig(method="loco", bits=4))

before the model is built, or `attach(model_chunks, config)` after it is wrapped in Megatron's
DistributedDataParallel. Importing this package changes nothing and does not import Megatron.

What `__all__` names is public, and follows semantic versioning (docs/api.md).
"""

from __future__ import annotations

from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.registry import register_codec, register_exchange
from megatron_patch.step_report import StepReport

__version__ = "0.2.0"
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
    "state_dict",
]


def enable(config: CompressionConfig | None = None) -> None:
    """Compress the gradients of every Megatron DistributedDataParallel built from now on.

    Args:
        config: the options; CompressionConfig() if None.

    Raises:
        UserError: `config` is no CompressionConfig. A model that cannot be served raises it when it is built.
    """
    from megatron_patch.megatron import doors

    doors.enable(config)


def disable() -> None:
    """Undo `enable` and detach every model: its own exchange from the next step on."""
    from megatron_patch import doors

    doors.disable()


def attach[Chunks](
    chunks: Chunks, config: CompressionConfig | None = None, replicate_group: Any = None
) -> Chunks:
    """Compress the gradients of a model that is wrapped, or sharded; returns it (a post-wrap hook).

    Args:
        chunks: Megatron's DistributedDataParallel, or a list of them; or a module that torch's `fully_shard`
            was applied to (FSDP2), or a list of such parts of a model.
        config: the options; CompressionConfig() if None.
        replicate_group: with FSDP2 over a mesh of one dimension, the torch.distributed.ProcessGroup of the
            ranks that hold the same shards: gradients are averaged over it in low bits, and FSDP2's own
            exchange stays as it is. A mesh of two dimensions says so itself.

    Raises:
        UserError: no such model, no CompressionConfig, or a configuration that compression cannot serve.
    """
    from megatron_patch import doors

    doors.attach(chunks, config, replicate_group)
    return chunks


def report(model: Any = None) -> StepReport:
    """What this rank sent in its last optimizer step. Communicates nothing: any rank may call it at any time.

    Args:
        model: what was attached; everything that is attached if None.

    Raises:
        UserError: nothing is attached, no step has ended yet, or models have different options and none is
            named.
    """
    from megatron_patch import doors

    return doors.report(model)


def offload(model: Any = None) -> None:
    """Move what compression keeps on the GPU between steps to host memory, and free its payload buffers.

    For engines that give the GPU to something else between steps: error states, the exact gather's old shards
    and messages, 1-bit Adam's momentum. `reload` brings them back bit for bit, and so does what needs them
    first: the next exchange, a weight gather, a checkpoint. `report().device_bytes` says what is on the GPU.

    Args:
        model: what was attached; everything that is attached if None.

    Raises:
        UserError: it is not attached, or gradients of a step have been exchanged that no optimizer has used.
    """
    from megatron_patch import doors

    doors.offload(model)


def reload(model: Any = None) -> None:
    """Bring back what `offload` has moved.

    Raises:
        UserError: the model is not attached.
    """
    from megatron_patch import doors

    doors.reload(model)


def state_dict(
    model: Any, optimizer: Any = None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """The error states of a model for torch.distributed.checkpoint; call on all ranks (docs/checkpoints.md).

    Args:
        model: what was attached.
        optimizer: Megatron's, needed with fp16; or torch's GradScaler, where one scales the loss.
        reader: a dcp.StorageReader of the checkpoint to load, saved in this layout of ranks or another.
        path: the keys under which that checkpoint has this model's states, joined by dots; needed where it
            has the states of several models.

    Raises:
        UserError: the reader's checkpoint has no error states there, or damaged ones.
    """
    from megatron_patch import doors

    return doors.state_dict(model, optimizer, reader, path)


def load_state_dict(model: Any, state: dict[str, Any], optimizer: Any = None) -> None:
    """Put back error states that torch.distributed.checkpoint.load has read into a `state_dict`.

    Raises:
        UserError: no state of `state_dict`, or one that is damaged.
    """
    from megatron_patch import doors

    doors.load_state_dict(model, state, optimizer)
