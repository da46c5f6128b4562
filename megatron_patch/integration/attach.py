"""attach, enable, disable: switching compression on and off for Megatron's DistributedDataParallel.

`attach` walks a wrapped model's bucket groups and overrides their gradient exchange (seams/gradients.py)
and their weight gather (seams/weights.py); `enable` makes every DistributedDataParallel that is built from
now on attach itself. What is attached, and what is not and why, is logged once. What the seam cannot serve
is refused (unsupported.py), never silently off.

Unsplit parameters of tensor-parallel ranks are kept equal by a mark that Megatron acts on
(seams/replicated_params.py).

Left unpatched: Megatron-FSDP and Torch-FSDP2 (they do not pass this seam), the embedding and layer-norm
all-reduces of finalize_model_grads (tiny, within a model-parallel group).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallel
from packaging.version import Version

from megatron_patch.collectives.workspace import forget_shared_pools
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.integration import patching, symbols
from megatron_patch.integration.chunk import ChunkState
from megatron_patch.integration.onebit_adam.step import OneBitAdam
from megatron_patch.integration.seams import optimizer_step, replicated_params
from megatron_patch.integration.seams.gradients import BucketGroupSeam
from megatron_patch.integration.seams.weights import ChunkWeights, gathered_after
from megatron_patch.integration.startup_log import log_startup
from megatron_patch.integration.unsupported import refuse_chunk, refuse_graphed, refuse_stepping

SUPPORTED = (Version("0.17"), Version("0.20"))
"""megatron-core releases that the seam's tests run on: from the first, below the second."""


class Attachment:
    """One attached DDP instance: its state and the seams of its bucket groups, dense before expert."""

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        buckets = [bucket for group in groups for bucket in group.buckets]
        device = buckets[0].grad_data.device if buckets else torch.device("cpu")
        self.state = ChunkState(config, device)
        self.seams = [
            BucketGroupSeam(group, self.state, expert=place >= len(chunk.bucket_groups))
            for place, group in enumerate(groups)
        ]
        self.weights = ChunkWeights(chunk, self.state)
        self._marked = replicated_params.mark(chunk) if config.compresses else []

    def detach(self) -> None:
        for seam in self.seams:
            seam.detach()
        self.weights.detach()
        replicated_params.unmark(self._marked)


_attachments: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()
_onebit: WeakKeyDictionary[Any, OneBitAdam] = WeakKeyDictionary()
"""By Megatron's optimizer."""


def attachment_of(chunk: Any) -> Attachment | None:
    """What is attached to a DDP instance; None where nothing is."""
    return _attachments.get(chunk)


def chunk_state_of(chunk: Any) -> ChunkState | None:
    """The compression state of an attached DDP instance; None where nothing is attached."""
    attachment = attachment_of(chunk)
    return attachment.state if attachment is not None else None


def attached_chunks() -> list[Any]:
    """All attached DDP instances."""
    return list(_attachments)


def attached_states() -> list[ChunkState]:
    """The compression states of all attached DDP instances."""
    return [attachment.state for attachment in _attachments.values()]


def onebit_of(optimizer: Any) -> OneBitAdam | None:
    """1-bit Adam's part of a Megatron optimizer; None before its first step, or where it is not attached."""
    return _onebit.get(optimizer)


def attach(chunks: Sequence[Any] | Any, config: CompressionConfig | None = None) -> Any:
    """Compress the gradient exchange of DDP-wrapped model chunks; returns them, so it is a post-wrap hook.

    Args:
        chunks: what Megatron's model builders return: a list of DistributedDataParallel, or one of them.
        config: the options; CompressionConfig() if None.

    Attaching a chunk again with the same options changes nothing; with other options, detach it first
    (`disable`). Call it before the optimizer's first step.

    Raises:
        UserError: a configuration that the seam cannot serve.
    """
    config = config or CompressionConfig()
    _warn_of_unknown_release()
    new = []
    for chunk in [chunks] if isinstance(chunks, DistributedDataParallel) else list(chunks):
        refuse_chunk(chunk, config)
        attached = _attachments.get(chunk)
        if attached is None:
            new.append(chunk)
        elif attached.state.config != config:
            raise UserError(
                "compression is attached to this model already, with other options; disable() first"
            )
    for chunk in new:  # only now: a refused chunk leaves the others as they were
        _attachments[chunk] = Attachment(chunk, config)
    if new:
        made = [_attachments[chunk] for chunk in new]
        log_startup(
            new[0],
            config,
            [seam for attachment in made for seam in attachment.seams],
            [seam for attachment in made for seam in attachment.weights.seams],
        )
    optimizer_step.listen(_end_step, _step)
    return chunks


def enable(config: CompressionConfig | None = None) -> None:
    """Attach every Megatron DistributedDataParallel that is built from now on.

    Enabling again replaces the options for models built later.
    """

    def attaching(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            attach([self], config)

        return __init__

    patching.restore(symbols.INIT)
    patching.replace(symbols.INIT, attaching)
    optimizer_step.listen(_end_step, _step)


def disable() -> None:
    """Undo `enable` and detach every attached model: Megatron's own exchange from the next step on."""
    patching.restore(symbols.INIT)
    for attachment in list(_attachments.values()):
        attachment.detach()
    _attachments.clear()
    _onebit.clear()
    forget_shared_pools()
    optimizer_step.stop_listening()


def _step(optimizer: Any, original: Callable[[], Any]) -> Any:
    """A step of Megatron's, and the gather of what it updated."""
    updated = [
        attachment for chunk, attachment in _attachments.items() if optimizer_step.updates(optimizer, chunk)
    ]
    for part in optimizer_step.leaves_of(optimizer) if updated else ():
        refuse_graphed(part.config)
        if any(attachment.state.config.compresses for attachment in updated):
            refuse_stepping(part)
    weights = [attachment.weights for attachment in updated]
    return gathered_after(weights, functools.partial(_update, optimizer, original))


def _update(optimizer: Any, original: Callable[[], Any]) -> Any:
    """A step of Megatron's, which 1-bit Adam makes where it is attached."""
    if (onebit := _onebit.get(optimizer)) is None:
        attached = [
            (chunk, attachment.state, attachment.seams)
            for chunk, attachment in _attachments.items()
            if attachment.state.config.momentum and optimizer_step.updates(optimizer, chunk)
        ]
        if not attached:
            return original()
        onebit = _onebit[optimizer] = OneBitAdam(optimizer, attached)
    return onebit.step(original)


def _end_step(optimizer: Any, successful: bool, loss_scale_factor: float) -> None:
    for chunk, attachment in list(_attachments.items()):
        if optimizer_step.updates(optimizer, chunk):
            attachment.state.optimizer_seen = True
            attachment.state.end_step(successful, loss_scale_factor)
            attachment.weights.end_step()


@functools.cache
def _warn_of_unknown_release() -> None:
    release = Version(Version(megatron.core.__version__).base_version)
    if not SUPPORTED[0] <= release < SUPPORTED[1]:
        warnings.warn(
            f"megatron-loco is tested with megatron-core >={SUPPORTED[0]},<{SUPPORTED[1]}; "
            f"this is {megatron.core.__version__}",
            stacklevel=3,
        )
