"""Megatron's checkpoints carry the error states: hooks into megatron.training.checkpointing.

    save_checkpoint                     before it: the states are copied, and written into a staging folder
      get_checkpoint_tracker_filename     after all ranks' barrier, before the checkpoint is announced as the
                                          latest: the staging folder moves into the checkpoint's
      schedule_async_save                 with --async-save: both happen when Megatron finalizes the save
    load_checkpoint                     before it: a torn tracker is repaired; after it: the states
                                        are put back
      _load_base_checkpoint               tells which folder was loaded, and its arguments

    megatron.core.dist_checkpointing.save  called by other code than the above: one line says that the states
                                        are not in that checkpoint, unless sharded_state.py was asked for them

All but the last are globals of that module, by which upstream itself calls them (0.17 to 0.19);
megatron.training.training binds saving and loading by name. A job without compression passes through
untouched, and reads checkpoints that have our folder in them: Megatron looks at its own files only.

Left alone: Megatron's local (per-node) checkpoints and object stores (`msc://`); loading one of those says
that errors start from zero.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_patch.integration import patching, symbols
from megatron_patch.integration.attach import attached_states
from megatron_patch.integration.checkpoint import sharded_state, tracker
from megatron_patch.integration.checkpoint.restore import Checkpoint, restore
from megatron_patch.integration.checkpoint.save import ErrorSave
from megatron_patch.integration.checkpoint.sharded_state import compressed

logger = logging.getLogger(__name__)

_MODULE = "megatron.training.checkpointing"
_ID = "compression_checkpoint_id"

_saving: ErrorSave | None = None
"""The save under way, between the beginning of save_checkpoint and its announcement."""
_in_save_checkpoint = False
_noticed = False
"""Whether it was said that a checkpoint does not hold the states."""
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
    patching.replace(symbols.CORE_SAVE, functools.partial(_wrapped, _core_save))
    if _MODULE in sys.modules or (not loaded_only and importlib.util.find_spec("megatron.training")):
        install()


def uninstall() -> None:
    """Give Megatron its own functions back."""
    patching.restore(*_WRAPPERS, symbols.CORE_SAVE)


def _bound(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _core_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """megatron.core.dist_checkpointing.save, which most trainers' own checkpoints pass."""
    global _noticed
    kept = [state for state in attached_states() if state.config.keeps_errors and state.config.save_error]
    if any(state.steps for state in kept) and not (
        _noticed or _in_save_checkpoint or sharded_state.asked_for or dist.get_rank() != 0
    ):
        _noticed = True
        logger.warning(
            "megatron-loco: a checkpoint is written by other code than megatron.training's, without error "
            "states: once it is loaded, errors start from zero; save megatron_patch.state_dict(model) too"
        )
    return original(*args, **kwargs)


@contextlib.contextmanager
def saves_states() -> Iterator[None]:
    """Around the writing of a checkpoint that the states are saved with."""
    global _in_save_checkpoint
    _in_save_checkpoint = True
    try:
        yield
    finally:
        _in_save_checkpoint = False


def _save_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saves_states():
        return _save_with_states(original, *args, **kwargs)


def _save_with_states(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _saving
    from megatron.training import get_args

    asked = _bound(original, args, kwargs)
    chunks, folder = compressed(asked["model"]), _folder_to_save(asked)
    if folder is None or not _on_all_ranks(bool(chunks)):
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


def _on_all_ranks(here: bool) -> bool:
    """Whether all ranks have states to save or to load; says so where some only have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, here)
    if any(found) and not all(found) and dist.get_rank() == 0:
        logger.warning(
            "megatron-loco: ranks %s have no attached model, so no error states are saved or loaded with "
            "this checkpoint; attach the model on all ranks, or call megatron_patch.state_dict on all",
            ", ".join(str(rank) for rank, has in enumerate(found) if not has),
        )
    return all(found)


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
        tracker.repair(Path(folder))
    dist.barrier()
    _loaded = None
    result = original(*args, **kwargs)
    chunks = compressed(asked["ddp_model"])
    loaded, _loaded = _loaded, None
    if loaded is None or not _on_all_ranks(bool(chunks)):
        return result
    if (asked["optimizer"] is None or flags.no_load_optim) and any(
        state.ended_steps for state in attached_states()
    ):
        return result  # other weights for a while, such as those of a reference model: no step of training
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
