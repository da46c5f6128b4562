"""What is attached of torch's own data parallelism, and the optimizer steps that it hears of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.pytorch import fsdp2
from megatron_patch.pytorch.fsdp2_fields import ParamGroup, groups_of
from megatron_patch.session import torch_steps
from megatron_patch.session.log import method_line
from megatron_patch.session.session import Session

logger = logging.getLogger(__name__)


class Attachment:
    """One attached model: its session, and what carries the gradients of its parameter groups.

    Args:
        model: a module below which `fully_shard` was applied.
        config: the options.
        replicas: the ranks that hold the same shards, where the model's mesh does not say.

    Raises:
        UserError: what cannot be served; nothing is changed then.
    """

    def __init__(
        self, model: nn.Module, config: CompressionConfig, replicas: dist.ProcessGroup | None
    ) -> None:
        self.asked = config
        self._model = model
        self.groups = list(groups_of(model))
        if not self.groups:
            raise UserError(
                f"attach(): {type(model).__name__} is not wrapped in Megatron's DistributedDataParallel, and "
                "no fully_shard was applied: pass what Megatron's model builders return, or shard it first"
            )
        self.shards, self.replicas = _ranks(self.groups, replicas)
        _refuse(self.groups, config)
        self.config = config if self.replicas is not None else config.for_flat_fsdp()
        ranks = [group for group in (self.shards, self.replicas) if group is not None]
        self.session = Session(self.config, self.groups[0].device, ranks)
        self.session.announces = dist.get_rank() == 0
        self.parts: list[fsdp2.Sets] = [
            fsdp2.Flat(group, self.session)
            if self.replicas is None
            else fsdp2.Hybrid(group, self.session, self.replicas)
            for group in self.groups
        ]

    def detach(self) -> None:
        for group in self.groups:
            group.restore()

    def updated_by(self, optimizer: Any) -> bool:
        """Whether an optimizer updates this model's parameters."""
        mine = {id(parameter) for parameter in self._model.parameters()}
        groups = getattr(optimizer, "param_groups", [])
        return any(id(parameter) in mine for group in groups for parameter in group["params"])

    def log(self) -> None:
        """Say what is on."""
        shards = self.shards.size()
        where = f"FSDP2 reduce-scatter over {shards} ranks"
        if self.replicas is not None:
            count = self.replicas.size()
            where = (
                f"FSDP2 all-reduce between {count} replicas of {shards} shards, reduced in full among them"
            )
        if not self.config.compresses:
            logger.info("megatron-loco: method none: %s, in full", where)
            return
        elements = sum(p.numel() for group in self.groups for p in group.tensors if p.requires_grad)
        size = f"{elements:,} gradient elements in {len(self.groups)} groups"
        logger.info("megatron-loco: %s", method_line(self.config))
        logger.info("megatron-loco: %s: %s", where, size)
        if self.config != self.asked:
            logger.info(
                "megatron-loco: naive is the default without replicas: method=loco keeps errors of the whole "
                "model on every rank, %.2f GB here",
                elements * 1.02 / 1e9,
            )


def _ranks(
    groups: list[ParamGroup], replicas: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The shard group and the replicas, which all parameter groups of a model must share."""
    pairs = {(group.shard_group, group.replicate_group) for group in groups}
    if len(pairs) > 1:
        raise UserError(
            "attach(): parts of this model are sharded over different meshes (expert parallelism?), which is "
            "not served yet: attach the parts of one mesh"
        )
    ((shards, native),) = pairs
    if native is not None and replicas is not None and native != replicas:
        raise UserError("attach(): the model's mesh has replicas already: leave out replicate_group")
    return shards, native or replicas


def _refuse(groups: list[ParamGroup], config: CompressionConfig) -> None:
    if config.is_onebit_adam:
        raise UserError("compression.method: onebit_adam is for Megatron's optimizers; use loco")
    if config.codes_weights:
        raise UserError(
            "compression.weight_gather: exact is for Megatron's distributed optimizer; FSDP2 gathers weights "
            "in every microbatch: leave it out"
        )
    for group in groups:
        if group.is_tensor_parallel:
            raise UserError("attach(): tensor-parallel parameters under fully_shard are not served yet")
        if taken := group.is_taken:
            raise UserError(f"attach(): {type(group.module).__name__} has {taken} already; leave it out")


_attachments: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()


def attach(
    models: Sequence[nn.Module], config: CompressionConfig, replicas: dist.ProcessGroup | None = None
) -> None:
    """Compress the gradients of models that `fully_shard` was applied to, parts of a pipeline say.

    Raises:
        UserError: what cannot be served, or other options than those that a model is attached with.
    """
    for model in models:
        found = _attachments.get(model)
        if found is not None and found.asked != config:
            raise UserError(
                "compression is attached to this model already, with other options; disable() first"
            )
        if found is None:
            _attachments[model] = made = Attachment(model, config, replicas)
            if made.session.announces:
                made.log()
    torch_steps.listen(_steps)


def sessions(models: Sequence[nn.Module] | None) -> list[Session]:
    """Those of models, of all that is attached if None."""
    found = list(_attachments.values()) if models is None else map(_attachments.get, models)
    return [attachment.session for attachment in found if attachment is not None]


def detach_all() -> None:
    """Give every attached model torch's own exchange back, from the next backward pass on."""
    for attachment in _attachments.values():
        attachment.detach()
    _attachments.clear()
    torch_steps.stop_listening(_steps)


class _Steps:
    """torch_steps.Listener."""

    def torch_step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and any(a.updated_by(optimizer) for a in _attachments.values()):
            raise UserError(
                f"{type(optimizer).__name__} steps within the backward pass, once for each parameter, so "
                "that compression cannot tell what a step is: step it after the backward pass"
            )

    def torch_step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        for attachment in _attachments.values():
            if attachment.updated_by(optimizer):
                rates = torch_steps.learning_rates(optimizer)
                attachment.session.optimizer_stepped([optimizer], True, 1.0, rates)

    def rescaled(self, optimizers: list[Any], factor: float) -> None:
        for attachment in _attachments.values():
            if any(attachment.updated_by(optimizer) for optimizer in optimizers):
                attachment.session.loss_rescaled(factor)


_steps = _Steps()
