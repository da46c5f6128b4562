"""The attached models of torch's FSDP2 and DDP, and how their sessions learn of optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.pytorch import ddp
from megatron_patch.session import torch_steps
from megatron_patch.session.report import method_line, naive_line
from megatron_patch.session.session import Session
from megatron_patch.session.states import Attachment, RankOf, RankState, announces
from megatron_patch.session.steps import Counts

logger = logging.getLogger(__name__)


class TorchAttachment(Attachment, Protocol):
    """One attached model of torch."""

    config: CompressionConfig
    """The options that are used; they may have another default method."""
    model: nn.Module

    @property
    def waits(self) -> bool:
        """Whether gradients of earlier microbatches wait for an exchange."""

    def prepare(self, sets: Sequence[Sequence[str]]) -> None:
        """Create the exchanges for those of a checkpoint's sets of names that fit. All ranks must call it."""

    def where(self) -> str:
        """Describe the exchange and its ranks, for the log."""

    def elements(self) -> int:
        """Return the number of gradient elements of the whole model."""


class _Held:
    """An attribute of a model that has its attachment, which refers to the model; it is None in copies.

    A table of attachments by model would keep its models alive.
    """

    def __init__(self, attachment: TorchAttachment, group: Any) -> None:
        self.attachment = attachment
        self.group = group
        """The `replicate_group` that the caller gave."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_HELD = "_megatron_loco"
_models: WeakSet[nn.Module] = WeakSet()
_earlier: WeakKeyDictionary[nn.Module, Counts] = WeakKeyDictionary()
"""The counts of models that were attached before and are detached now."""


def attachment_of(model: nn.Module) -> TorchAttachment | None:
    """Return a model's attachment; None if nothing is attached to it."""
    held = vars(model).get(_HELD)
    # A shallow copy of a model has the same attribute.
    return held.attachment if held is not None and held.attachment.model is model else None


def _all() -> list[TorchAttachment]:
    return [attachment for model in list(_models) if (attachment := attachment_of(model)) is not None]


def attach(
    models: Sequence[nn.Module], config: CompressionConfig, replicas: dist.ProcessGroup | None = None
) -> None:
    """Compress the gradients of models that are wrapped in DDP, or to which `fully_shard` was applied.

    Raises:
        UserError: a model or option is not supported, or a model is already attached with other options.
    """
    config = config.without_turns()
    for model in models:
        attached = attachment_of(model)
        if attached is not None and (attached.asked, vars(model)[_HELD].group) != (config, replicas):
            raise UserError(
                "compression is attached to this model already, with other options or another group; "
                "disable() first"
            )
        if attached is None:
            attachment = _make(model, config, replicas)
            # nn.Module.__setattr__ is for parameters and modules.
            vars(model)[_HELD] = _Held(attachment, replicas)
            _models.add(model)
            says = attachment.session.ledger.announces = announces(attachment)
            for line in lines(attachment) if says else ():
                logger.info("megatron-loco: %s", line)
            if model in _earlier:
                attachment.session.ledger.go_on_from(_earlier.pop(model))
    torch_steps.listen(_steps)


def _make(model: nn.Module, config: CompressionConfig, replicas: dist.ProcessGroup | None) -> TorchAttachment:
    if config.is_onebit_adam:
        raise UserError("compression.method: onebit_adam is for Megatron's optimizers; use loco")
    if config.codes_weights:
        raise UserError(
            "compression.weight_gather: exact is for Megatron's distributed optimizer, which gathers weights "
            "once a step: leave it out"
        )
    if config.outer_steps:
        raise UserError(
            "compression.outer_interval is for instances of Megatron's distributed optimizer: leave it out"
        )
    if not isinstance(model, DistributedDataParallel):
        from megatron_patch.pytorch import fsdp2  # It needs a newer torch than DDP does.

        return fsdp2.Fsdp2(model, config, replicas)
    if replicas is not None:
        raise UserError("attach(): DistributedDataParallel knows its group: leave out replicate_group")
    return ddp.Ddp(model, config)


def lines(attachment: TorchAttachment) -> Iterator[str]:
    """Yield the lines about a newly attached model for the log."""
    config, where = attachment.config, attachment.where()
    if not config.compresses:
        yield f"method none: {where}, in full"
        return
    yield method_line(config)
    yield f"{where}: {attachment.elements():,} gradient elements"
    if config != attachment.asked:
        yield naive_line(attachment.elements())


def sessions(models: Sequence[nn.Module] | None) -> list[Session]:
    """Return the sessions of attached models among `models`; None: of all attached models."""
    attachments = _all() if models is None else map(attachment_of, models)
    return [attachment.session for attachment in attachments if attachment is not None]


def rank_of(models: Sequence[nn.Module]) -> RankOf | None:
    """Return the RankOf of the models, for a checkpoint; None if none of them compresses."""
    placed = {
        place: attachment
        for place, model in enumerate(models)
        if (attachment := attachment_of(model)) and attachment.config.compresses
    }
    if not placed:
        return None

    def make(sets: Mapping[int, Sequence[Sequence[str]]]) -> RankState:
        # Models that are saved together may have parameters of the same names.
        for place, attachment in placed.items():
            attachment.prepare(sets.get(place, ()))
        return RankState(list(placed.values()), places=list(placed))

    return make


def detach_all() -> None:
    if any(attachment.waits for attachment in _all()):
        raise UserError(
            "disable(): gradients of earlier microbatches wait for their all-reduce, which torch may make "
            "otherwise: call it between steps, or discard them (reset_iter_state(), if torch has it)"
        )
    for model in list(_models):
        attachment = attachment_of(model)
        assert attachment is not None
        _earlier[model] = attachment.session.ledger.counts
        attachment.detach()
        del vars(model)[_HELD]
    _models.clear()
    torch_steps.stop_listening(_steps)


class _Steps:
    """Reports what torch's optimizers do to the sessions of the models that they update."""

    def torch_step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        for attachment in _all():
            known = attachment.session.ledger.seen and not in_backward
            if known or not attachment.session.ledger.own(torch_steps.parameters_of(optimizer)):
                continue
            if in_backward:
                raise UserError(
                    f"{type(optimizer).__name__} steps within the backward pass, once for each parameter, so "
                    "that compression cannot tell what a step is: step it after the backward pass"
                )
            attachment.session.ledger.see()

    def torch_step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        for attachment in _all():
            if parameters := attachment.session.ledger.own(torch_steps.parameters_of(optimizer)):
                rates = torch_steps.learning_rates(optimizer)
                attachment.session.optimizer_stepped([optimizer], rates=rates, parameters=parameters)

    def optimizer_clears(self, optimizer: torch.optim.Optimizer) -> None:
        for attachment in _all():
            attachment.session.gradients_cleared(torch_steps.parameters_of(optimizer), optimizer)

    def module_clears(self, module: nn.Module) -> None:
        for attachment in _all():
            attachment.session.gradients_cleared(module.parameters())


_steps = _Steps()
