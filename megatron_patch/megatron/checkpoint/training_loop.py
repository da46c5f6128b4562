"""Wraps `save_checkpoint` and `load_checkpoint` of Megatron's own training loop.

`load_checkpoint` first repairs an empty tracker file. The formats `torch`, `torch_dcp` and `fsdp_dtensor` do
not use dist_checkpointing: with them, `save_checkpoint` has every rank write its error states to
megatron_loco/rank-00003.pt in the checkpoint's folder, before Megatron writes its own files and the tracker
file, and `load_checkpoint` restores them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.errors import UserError
from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.attach import finish_outer_steps, outer_steps_of
from megatron_patch.megatron.checkpoint import dist_checkpointing, tracker
from megatron_patch.megatron.checkpoint.dist_checkpointing import restore
from megatron_patch.megatron.checkpoint.states import compressed, rank_state_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale
from megatron_patch.session.states import Damaged, Saved, pack

logger = logging.getLogger(__name__)
_MODULE = "megatron.training.checkpointing"
_FOLDER = "megatron_loco"
_FORMATS = ("torch", "torch_dcp", "fsdp_dtensor")
"""The checkpoint formats that do not use dist_checkpointing."""


def install(loaded_only: bool = False) -> None:
    """Replace the functions of Megatron that save and load checkpoints.

    With `loaded_only`, those of megatron.training are replaced only if the process has imported them.
    """
    dist_checkpointing.install()
    if _MODULE in sys.modules or (not loaded_only and importlib.util.find_spec("megatron.training")):
        for path, wrapper in _WRAPPERS.items():
            patching.wrap(path, wrapper)


def uninstall() -> None:
    """Restore Megatron's own functions."""
    dist_checkpointing.uninstall()
    patching.restore(*_WRAPPERS)


def _bound(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _save_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    asked, flags = _bound(original, args, kwargs), get_args()
    finish_outer_steps(asked["optimizer"], asked["model"])
    if flags.ckpt_format in _FORMATS and dist.get_rank() == 0 and outer_steps_of(asked["model"]):
        logger.warning(
            "megatron-loco: --ckpt-format %s keeps no momentum, errors and Adam states of outer steps: a "
            "resumed run begins them anew",
            flags.ckpt_format,
        )
    if flags.ckpt_format in _FORMATS and flags.save and not asked["non_persistent_ckpt"]:
        base = get_checkpoint_name(flags.save, asked["iteration"], asked["release"], return_base_dir=True)
        if "://" not in base:
            save(Path(base), compressed(asked["model"]), asked["optimizer"])
        elif dist.get_rank() == 0 and compressed(asked["model"]):
            logger.warning(
                "megatron-loco: --ckpt-format %s keeps no error states in an object store, and a resumed run "
                "starts from zero: use torch_dist",
                flags.ckpt_format,
            )
    return original(*args, **kwargs)


def save(folder: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    """Write the error states of all ranks to a checkpoint's folder; all ranks must call it.

    They are in a folder of this save alone until all are complete: files of a killed save are never among
    them.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    mine = folder / f"{_FOLDER}.{name[0]}"
    if chunks:
        manifest, data = pack(rank_state_of(chunks, optimizer), loss_scale(optimizer))
        try:
            mine.mkdir(parents=True, exist_ok=True)
            torch.save({"manifest": manifest, "data": data}, _file(mine, dist.get_rank()))
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full.
            raise UserError(
                f"the error states could not be saved to {mine}: {error}; the last complete checkpoint is "
                "still the latest"
            ) from error
    dist.barrier()
    if dist.get_rank() == 0:
        for other in set(folder.glob(f"{_FOLDER}*")) - {mine}:
            shutil.rmtree(other, ignore_errors=True)
        if mine.exists():
            mine.rename(folder / _FOLDER)


def _load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import checkpointing, get_args

    asked, flags = _bound(original, args, kwargs), get_args()
    base = getattr(flags, asked["load_arg"])
    if base is not None and dist.get_rank() == 0:
        tracker.repair(Path(base))
        tracker.repair(Path(flags.non_persistent_global_ckpt_dir or f"{base}/non_persistent"))
    dist.barrier()
    read, (path, kind) = checkpointing._load_base_checkpoint, ("", None)

    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal path, kind
        found = read(*args, **kwargs)
        path, kind = str(found[1]), found[3]
        return found

    with patching.swapped({symbols.READ_CHECKPOINT: noting}):
        result = original(*args, **kwargs)
    chunks, iteration, kinds = compressed(asked["ddp_model"]), int(result[0]), checkpointing.CheckpointType
    if not chunks or not iteration or asked["optimizer"] is None or flags.finetune or flags.no_load_optim:
        return result
    if kind is not kinds.GLOBAL:  # dist_checkpointing.py has restored the errors of a global one.
        folder = Path(path).parents[1] if kind is kinds.LEGACY else Path(path)  # of FOLDER/mp_rank_00/FILE
        rank, scale = rank_state_of(chunks, asked["optimizer"]), loss_scale(asked["optimizer"])
        restore(rank, folder, lambda: saved(folder), iteration, scale)
    return result


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pt"


def saved(folder: Path) -> Saved | None:
    """Return the error states in a checkpoint's folder; None if it has none."""
    mine = folder / _FOLDER
    if not mine.exists():
        return None

    @functools.cache
    def read(rank: int) -> tuple[str, torch.Tensor]:
        try:
            content = torch.load(_file(mine, rank), map_location="cpu", weights_only=True)  # noqa: TID251
            return str(content["manifest"]), content["data"]
        except Exception as error:  # torch's errors differ between releases.
            first = str(error).partition("\n")[0]
            raise Damaged(f"{_file(mine, rank).name} cannot be read: {first}") from error

    numbers = (path.stem.removeprefix("rank-") for path in mine.glob("rank-*.pt"))
    ranks = {int(number) for number in numbers if number.isdecimal()}
    return Saved(ranks, lambda rank: read(rank)[0], lambda rank: read(rank)[1])


_WRAPPERS: dict[str, Callable[..., Any]] = {
    symbols.SAVE_CHECKPOINT: _save_checkpoint,
    symbols.LOAD_CHECKPOINT: _load_checkpoint,
}
