"""The implementation of the public functions: each passes the model on to megatron/ or to pytorch/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.collectives.workspace import forget_shared_pools
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.releases import refuse_old_torch
from megatron_patch.session import states
from megatron_patch.session.report import show_log, step_report
from megatron_patch.session.session import Session
from megatron_patch.step_report import StepReport


def attach(model: Any, config: CompressionConfig | None, replicate_group: dist.ProcessGroup | None) -> None:
    options = CompressionConfig() if config is None else config
    if not isinstance(options, CompressionConfig):
        raise UserError(
            f"attach(): the configuration is a {type(config).__name__}, not a CompressionConfig: "
            "megatron_patch.CompressionConfig(bits=4)"
        )
    refuse_old_torch()
    show_log()
    if _is_megatron(model):
        if replicate_group is not None:
            raise UserError(
                "attach(): Megatron's DistributedDataParallel knows its groups: leave out replicate_group"
            )
        from megatron_patch.megatron import doors

        doors.attach(model, options)
        return
    from megatron_patch.pytorch import attach as pytorch

    pytorch.attach(_modules(model, "attach"), options, replicate_group)


def disable() -> None:
    if loaded := sys.modules.get("megatron_patch.pytorch.attach"):
        loaded.detach_all()  # It may refuse.
    if loaded := sys.modules.get("megatron_patch.megatron.doors"):
        loaded.disable()
    forget_shared_pools()


def report(model: Any) -> StepReport:
    return step_report(*_sessions(model, "report"))


def skip_step(model: Any) -> None:
    for session in _sessions(model, "skip_step")[0]:
        session.skip_step()


def offload(model: Any) -> None:
    sessions, _ = _sessions(model, "offload")
    if any(session.ledger.within_step for session in sessions):
        raise UserError(
            "offload(): gradients have been exchanged that no optimizer has used yet; call it between steps"
        )
    for session in sessions:
        session.memory.offload()
        session.workspace.pool.release()


def reload(model: Any) -> None:
    for session in _sessions(model, "reload")[0]:
        session.memory.bring_back()


def _sessions(model: Any, caller: str) -> tuple[list[Session], Traffic | None]:
    """Return the sessions of a model (None: of all attached models), and Megatron's weight-gather traffic."""
    sessions: list[Session] = []
    weights = None
    of_megatron = model is None or _is_megatron(model)
    if of_megatron and (loaded := sys.modules.get("megatron_patch.megatron.doors")):
        sessions, weights = loaded.sessions(model)
    torchs = _modules(model, caller) if model is not None and not of_megatron else None
    if (torchs is not None or model is None) and (loaded := sys.modules.get("megatron_patch.pytorch.attach")):
        sessions = [*sessions, *loaded.sessions(torchs)]
    if not sessions:
        what = "no model is" if model is None else "this model is not"
        raise UserError(
            f"{caller}(): {what} attached; call megatron_patch.enable() before the model is wrapped in "
            "Megatron's DistributedDataParallel, or megatron_patch.attach(model) after it (FSDP2: after "
            "fully_shard)"
        )
    return sessions, weights


def state_dict(model: Any, optimizer: Any, reader: Any, path: str | None) -> dict[str, Any]:
    if _is_megatron(model):
        from megatron_patch.megatron.checkpoint import states as of_megatron

        return of_megatron.state_dict(model, optimizer, reader, path)
    from megatron_patch.pytorch import attach as pytorch

    rank_of = pytorch.rank_of(_modules(model, "state_dict"))
    return states.state_dict(rank_of, None, reader, path)


def load_state_dict(model: Any, state: dict[str, Any], optimizer: Any) -> None:
    if _is_megatron(model):
        from megatron_patch.megatron.checkpoint import states as of_megatron

        of_megatron.load_state_dict(model, state, optimizer)
        return
    from megatron_patch.pytorch import attach as pytorch

    scale = float(optimizer.get_scale()) if hasattr(optimizer, "get_scale") else 1.0  # A GradScaler's.
    states.load_state_dict(pytorch.rank_of(_modules(model, "load_state_dict")), state, scale)


def _is_megatron(model: Any) -> bool:
    """Whether a model, or the first of a list of models, is wrapped in a DDP or FSDP class of Megatron."""
    first = model[0] if isinstance(model, list | tuple) and model else model
    base = sys.modules.get("megatron.core.distributed.data_parallel_base")
    return base is not None and isinstance(first, base._BaseDataParallel)


_WRAPPING = ("torch.distributed", "torch.nn.parallel", "megatron.core.distributed", "deepspeed")
"""The packages whose modules wrap models, for messages."""


def _modules(model: Any, caller: str) -> Sequence[Any]:
    """Return what is attached of a model outside Megatron: its module of `fully_shard`, or the
    DistributedDataParallels, around which torch.compile and trainers may have put wrappers of their own.

    Raises:
        UserError: a part of it uses neither DDP nor FSDP2, or both; the message says what was found.
    """
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    found: dict[nn.Module, None] = {}
    for part in list(model) if isinstance(model, list | tuple) else [model]:
        modules = list(part.modules()) if isinstance(part, nn.Module) else []
        wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
        shards = [module for module in modules if isinstance(module, FSDPModule)]
        if bool(wrapped) == bool(shards):
            kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in modules]
            held = ", ".join(sorted({kind for kind in kinds if kind.startswith(_WRAPPING)}))
            what = (
                "is not wrapped in Megatron's DistributedDataParallel, nor in torch's, and fully_shard was "
                "not applied to it"
            ) + (held and f"; it holds {held}")
            if shards:
                what = "has DistributedDataParallel and fully_shard in it: attach its parts by themselves"
            raise UserError(f"{caller}(): {type(part).__module__}.{type(part).__qualname__} {what}")
        # Wrappers may be around the model, and within fully_shard.
        in_one = shards and set(shards) <= set(shards[0].modules())
        whole: Any = shards[0] if in_one else getattr(part, "_orig_mod", part)
        found |= dict.fromkeys(wrapped or [whole])
    return list(found)
