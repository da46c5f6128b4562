"""Megatron's checkpoints carry the error states: hooks into megatron.training.checkpointing.

    save_checkpoint                     before it: the states are copied, and written into a staging folder
      get_checkpoint_tracker_filename     after all ranks' barrier, before the checkpoint is announced as the
                                          latest: the staging folder moves into the checkpoint's
      schedule_async_save                 with --async-save: both happen when Megatron finalizes the save
    load_checkpoint                     before it: a torn tracker is mended (tracker.py); after it: the states
                                        are put back
      _load_base_checkpoint               tells which folder was loaded, and its arguments

All are globals of that module, by which upstream itself calls them (0.17 to 0.19); megatron.training.training
binds saving and loading by name. A job without compression passes through untouched, and reads checkpoints
that have our folder in them: Megatron looks at its own files only.

Left alone: Megatron's local (per-node) checkpoints and object stores (`msc://`); loading one of those says
that errors start from zero.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_patch.integration import patching, symbols
from megatron_patch.integration.attach import chunk_state_of
from megatron_patch.integration.checkpoint import tracker
from megatron_patch.integration.checkpoint.restore import Checkpoint, restore
from megatron_patch.integration.checkpoint.save import ErrorSave

_MODULE = "megatron.training.checkpointing"
_ID = "compression_checkpoint_id"

_saving: ErrorSave | None = None
"""The save under way, between the beginning of save_checkpoint and its announcement."""
_loaded: tuple[Any, ...] | None = None
"""What _load_base_checkpoint returned last: state dict, checkpoint's name, release, type."""


def install() -> None:
    """Hook into megatron.training's checkpoints; idempotent. Scripts must bind its functions after this."""
    for path, wrapper in _WRAPPERS.items():
        patching.replace(path, functools.partial(_wrapped, wrapper))


def _wrapped(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(functools.partial(wrapper, original))


def install_where_present(loaded_only: bool = False) -> None:
    """`install` where megatron.training is installed (`loaded_only`: imported); the core works without."""
    if _MODULE in sys.modules or (not loaded_only and importlib.util.find_spec("megatron.training")):
        install()


def uninstall() -> None:
    """Give Megatron its own functions back."""
    patching.restore(*_WRAPPERS)


def _bound(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _compressed(chunks: Any) -> list[Any]:
    """The chunks whose gradients leave in low bits."""
    found = []
    for chunk in chunks if isinstance(chunks, list | tuple) else [chunks]:
        state = chunk_state_of(chunk)
        if state is not None and state.config.compresses:
            found.append(chunk)
    return found


def _save_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _saving
    from megatron.training import get_args

    asked = _bound(original, args, kwargs)
    chunks, folder = _compressed(asked["model"]), _folder_to_save(asked)
    if not chunks or folder is None:
        return original(*args, **kwargs)
    flags = get_args()
    saving = ErrorSave(chunks, folder, int(asked["iteration"]), asked["optimizer"])
    setattr(flags, _ID, saving.id)
    if not flags.async_save:
        saving.write()
        saving.complete()
    _saving = saving
    try:
        return original(*args, **kwargs)
    except BaseException:
        saving.discard()  # it may be the disk that is full
        raise
    finally:
        _saving = None


def _folder_to_save(asked: dict[str, Any]) -> Path | None:
    """The folder of the checkpoint that save_checkpoint will write; None where it has none of its own."""
    from megatron.training import checkpointing, get_args

    flags = get_args()
    base = flags.save
    if asked["non_persistent_ckpt"]:
        if flags.non_persistent_ckpt_type != "global":
            return None
        below = f"{base}/{checkpointing._NON_PERSISTENT_CKPT_SUBDIR}"
        base = flags.non_persistent_global_ckpt_dir or below
    if base is None or "://" in str(base):
        return None
    return Path(
        checkpointing.get_checkpoint_name(
            base, asked["iteration"], release=asked["release"], return_base_dir=True
        )
    )


def _get_checkpoint_tracker_filename(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a synchronous save, rank 0 asks for it once, when everything is written on all ranks."""
    global _saving
    from megatron.training import get_args

    if _saving is not None and not get_args().async_save and dist.get_rank() == 0:
        saving, _saving = _saving, None
        saving.publish()
    return original(*args, **kwargs)


def _schedule_async_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _saving
    saving, _saving = _saving, None
    if saving is None:
        return original(*args, **kwargs)

    def finalize() -> None:
        saving.complete()
        if dist.get_rank() == 0:
            saving.publish()

    # Finalizers run on all ranks, in order; the last ones announce the checkpoint.
    _bound(original, args, kwargs)["async_request"].finalize_fns.insert(0, finalize)
    result = original(*args, **kwargs)
    saving.start()  # only now: Megatron forks its writer, and a fork wants no other thread
    return result


def _load_base_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _loaded
    result = original(*args, **kwargs)
    if result[0] is not None:
        _loaded = result
    return result


def _load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _loaded
    from megatron.training import get_args

    asked, flags = _bound(original, args, kwargs), get_args()
    folder = getattr(flags, asked["load_arg"])
    if folder is not None and dist.get_rank() == 0:
        tracker.mend(Path(folder))
    dist.barrier()
    _loaded = None
    result = original(*args, **kwargs)
    chunks = _compressed(asked["ddp_model"])
    loaded, _loaded = _loaded, None
    if not chunks or loaded is None:
        return result
    state, name, release, kind = loaded
    folder, without = _folder_of(str(name)), "the checkpoint has none"
    for reason, holds in (
        ("a release checkpoint has none", release),
        ("--finetune begins a new run", flags.finetune),
        ("--no-load-optim leaves them out", flags.no_load_optim),
        ("Megatron's local checkpoints do not hold them", getattr(kind, "name", "") == "LOCAL"),
    ):
        if holds:
            folder, without = None, reason
    saved_flags = state.get("args")
    found = Checkpoint(folder, int(result[0]), getattr(saved_flags, _ID, None), without)
    restore(chunks, found, asked["optimizer"])
    return result


def _folder_of(name: str) -> Path | None:
    """The checkpoint's folder, from the name of it or of a file in it."""
    path = Path(name)
    return next((p for p in (path, *path.parents) if p.name.startswith("iter_")), None)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    symbols.SAVE_CHECKPOINT: _save_checkpoint,
    symbols.TRACKER_FILENAME: _get_checkpoint_tracker_filename,
    symbols.SCHEDULE_ASYNC_SAVE: _schedule_async_save,
    symbols.LOAD_CHECKPOINT: _load_checkpoint,
    symbols.LOAD_BASE_CHECKPOINT: _load_base_checkpoint,
}
