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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.errors import UserError
from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.attach import finish_outer_steps
from megatron_patch.megatron.checkpoint import dist_checkpointing, tracker
from megatron_patch.megatron.checkpoint.dist_checkpointing import restore
from megatron_patch.megatron.checkpoint.states import compressed, rank_state_of
from megatron_patch.megatron.seams.optimizer_step import loss_scale
from megatron_patch.session.states import Damaged, Saved, pack

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

    asked, flags = _bound(original, args, kwargs), get_args()
    finish_outer_steps(asked["optimizer"], asked["model"])
    chunks = compressed(asked["model"])
    if chunks and flags.ckpt_format in _FORMATS and flags.save and not asked["non_persistent_ckpt"]:
        manifest, data = pack(rank_state_of(chunks, asked["optimizer"]), loss_scale(asked["optimizer"]))
        path = _file(_folder(flags.save, asked["iteration"], asked["release"]), dist.get_rank())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"manifest": manifest, "data": data}, path)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full.
            raise UserError(
                f"the error states could not be saved to {path}: {error}; the last complete checkpoint is "
                "still the latest"
            ) from error
    return original(*args, **kwargs)


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
        restore(rank, folder, lambda: _saved(folder), iteration, scale)
    return result


def _folder(base: str, iteration: int, release: bool) -> Path:
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name(base, iteration, release=release, return_base_dir=True))


def _file(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"rank-{rank:05d}.pt"


def _saved(folder: Path) -> Saved | None:
    if not (folder / _FOLDER).exists():
        return None

    @functools.cache
    def read(saved: int) -> dict[str, Any]:
        try:
            content = torch.load(_file(folder, saved), map_location="cpu", weights_only=True)  # noqa: TID251
            assert isinstance(content, dict)
        except Exception as error:  # torch's errors differ between releases.
            raise Damaged(f"{_file(folder, saved).name} cannot be read: {error}") from error
        return content

    files = (folder / _FOLDER).glob("rank-*.pt")
    ranks = {int(path.stem.removeprefix("rank-")) for path in files}
    return Saved(ranks, lambda saved: str(read(saved)["manifest"]), lambda saved: read(saved)["data"])


_WRAPPERS: dict[str, Callable[..., Any]] = {
    symbols.SAVE_CHECKPOINT: _save_checkpoint,
    symbols.LOAD_CHECKPOINT: _load_checkpoint,
}
