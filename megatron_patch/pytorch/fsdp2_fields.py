"""Access to all private fields of torch's FSDP2 that the package reads or sets.

FSDP2 (`torch.distributed.fsdp.fully_shard`) lets users set a reduce-scatter and a hook after it
(`FSDPModule.set_custom_reduce_scatter`, `set_all_reduce_hook`), but tells neither of them which parameters'
gradients are exchanged. This is read here from FSDP2's parameter groups, which torch may change in any
release: a missing field raises a UserError that names torch's release and the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_patch.errors import UserError
from megatron_patch.pytorch.contents import Sharded
from megatron_patch.releases import refuse_old

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
except ImportError as error:
    refuse_old("FSDP2", torch.__version__, "install a newer one, or use DistributedDataParallel")
    raise UserError(f"torch {torch.__version__}: {error}; this release's FSDP2 is not supported") from error

__all__ = ["FSDPModule", "ParamGroup", "ReduceScatter", "groups_of", "local_of"]

_OF_CLASS = object()
"""Stands for the value of an attribute that only the class has."""


class ParamGroup:
    """A parameter group of FSDP2 (`FSDPParamGroup`), whose gradients are reduced in one exchange.

    Raises:
        UserError: this release of torch lacks a field that is needed.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.module = module
        self._group = group
        self._current: tuple[int, ...] | None = None
        self._undo: list[tuple[str, Any, Any]] = []
        self._hook: Callable[[torch.Tensor], None] | None = None
        self._comm: ReduceScatter | None = None
        self._later: Callable[[torch.Tensor], None] | None = None
        """The hook that was set after ours."""
        self._kept: torch.Tensor | None = None
        self._partial_of: tuple[int, ...] | None = None
        self._tell: Callable[[str], None] = print
        for path in ("fsdp_params", "mesh_info", "gradient_divide_factor", "all_reduce_grads"):
            self._get(path)

    def _get(self, name: str, owner: Any = None) -> Any:
        try:
            return getattr(self._group if owner is None else owner, name)
        except AttributeError as error:
            kind = type(self._group if owner is None else owner).__name__
            raise UserError(
                f"torch {torch.__version__}: FSDP2's {kind} has no {name}; this release is not supported"
            ) from error

    def _set(self, name: str, value: Any) -> None:
        self._get(name)
        self._undo.append((name, vars(self._group).get(name, _OF_CLASS), value))
        setattr(self._group, name, value)

    def restore(self) -> None:
        """Restore the values of all fields that were set, unless torch's setters have set others."""
        if self._hook is not None and self._get("_all_reduce_hook") is self._hook:
            self._group._all_reduce_hook = self._later
        while self._undo:
            name, before, ours = self._undo.pop()
            if self._get(name) is ours and before is _OF_CLASS:
                delattr(self._group, name)
            elif self._get(name) is ours:
                setattr(self._group, name, before)

    @property
    def parameters(self) -> list[Sharded]:
        """The group's parameters, in FSDP2's order."""
        return [
            Sharded(tuple(self._get("_orig_size", p)), self._get("fsdp_placement", p).dim)
            for p in self._get("fsdp_params")
        ]

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """For each parameter the module that has it, and its name in that module."""
        infos = [self._get("_module_info", p) for p in self._get("fsdp_params")]
        return [(info.module, info.param_name) for info in infos]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """This rank's chunk of each parameter, the DTensor that the optimizer updates."""
        return [self._get("sharded_param", p) for p in self._get("fsdp_params")]

    @property
    def device(self) -> torch.device:
        """The device on which gradients are exchanged; with CPU offloading parameters are elsewhere."""
        device: torch.device = self._get("device")
        return device

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether parameters were DTensors before they were sharded."""
        return any(self._get("is_dtensor", p) for p in self._get("fsdp_params"))

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that each have one chunk of every parameter."""
        info = self._get("mesh_info")
        if not isinstance(info, FSDPMeshInfo):
            raise UserError("attach(): a model of replicate() is not sharded: use DistributedDataParallel")
        group: dist.ProcessGroup = info.shard_process_group
        return group

    @property
    def reduce_scatter_group(self) -> dist.ProcessGroup:
        """The ranks of `shard_group`, in another group if `set_separate_reduce_scatter_group` made one."""
        group: dist.ProcessGroup = getattr(self._group, "_reduce_scatter_process_group", self.shard_group)
        return group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """With a mesh of two dimensions the ranks that have the same chunk; else None."""
        info = self._get("mesh_info")
        return info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None

    @property
    def is_taken(self) -> str | None:
        """What has already replaced FSDP2's own exchange, for an error message; None if nothing has."""
        comm = self._get("_reduce_scatter_comm")
        if type(comm) is not DefaultReduceScatter:  # set_symm_mem_for_comm sets one, too.
            return f"a reduce-scatter of its own ({type(comm).__name__})"
        return None if self._get("_all_reduce_hook") is None else "an all-reduce hook"

    @property
    def divide_factor(self) -> float | None:
        """The argument of `set_gradient_divide_factor`; None: gradients are averaged."""
        factor: float | None = self._get("gradient_divide_factor")
        return factor

    @property
    def all_reduces(self) -> bool:
        """Whether the next reduce-scatter is followed by the all-reduce (`set_requires_all_reduce`)."""
        return bool(self._get("all_reduce_grads"))

    @property
    def current(self) -> tuple[int, ...]:
        """The indices of the parameters whose gradients are exchanged now, in the order of the exchange."""
        return tuple(range(len(self._get("fsdp_params")))) if self._current is None else self._current

    def note_what_is_exchanged(self, tell: Callable[[str], None]) -> None:
        """Keep `current` up to date from now on, and `tell` of exchanges that others have set."""
        self._tell = tell
        self._set("post_backward", self._around(self._get("post_backward")))
        if not hasattr(self._group, "_prepare_reduce_scatter_inputs"):
            return
        prepare = self._get("_prepare_reduce_scatter_inputs")

        def noting(params: Sequence[Any], *args: Any) -> Any:
            numbers = {id(p): number for number, p in enumerate(self._get("fsdp_params"))}
            self._current = tuple(numbers[id(p)] for p in params)
            return prepare(params, *args)

        self._set("_prepare_reduce_scatter_inputs", noting)

    def _around(self, post_backward: Callable[..., None]) -> Callable[..., None]:
        def has_gradient(p: Any) -> bool:
            if not hasattr(p, "_unsharded_param"):  # The group's backward pass has not needed it.
                return False
            unsharded = p.unsharded_param
            zeros = unsharded.requires_grad and getattr(self._group, "reduce_scatter_unused_params", False)
            return zeros or p.unsharded_accumulated_grad is not None or unsharded.grad is not None

        def exchanging(*unused: Any) -> None:
            self._look_at_exchange()
            # Up to torch 2.14, the parameters that have gradients now are exchanged.
            if not hasattr(self._group, "_prepare_reduce_scatter_inputs"):
                self._current = tuple(n for n, p in enumerate(self._get("fsdp_params")) if has_gradient(p))
            self._kept = None
            post_backward(*unused)
            if self._kept is not None:  # The exchange has set it to None.
                self._group._partial_reduce_output, self._kept = self._kept, None

        return exchanging

    def _look_at_exchange(self) -> None:
        """Notice what torch's public setters have set since the model was attached."""
        hook, comm = self._get("_all_reduce_hook"), self._get("_reduce_scatter_comm")
        if self._hook is not None and hook is not self._hook:
            self._later, self._group._all_reduce_hook = hook, self._hook
            self._tell("an all-reduce hook was set; it runs after the compressed all-reduce")
        if self._comm is not None and comm is not self._comm:
            self._comm = None
            self._tell(f"{type(comm).__name__} has replaced the compressed reduce-scatter: it sends in full")

    @property
    def partial(self) -> torch.Tensor | None:
        """The reduced shard of earlier microbatches, which waits for its all-reduce.

        FSDP2 keeps it, so that `reset_iter_state` discards it.
        """
        waits: torch.Tensor | None = self._get("_partial_reduce_output")
        return waits

    def partial_for(self, output: torch.Tensor) -> torch.Tensor | None:
        """Return `partial`, with the elements of `output`, which is being exchanged.

        Raises:
            UserError: other parameters are exchanged, and this release cannot add them.
        """
        if hasattr(self._group, "_prepare_partial_reduce_output"):
            params = [self._get("fsdp_params")[n] for n in self.current]
            sizes = [p.padded_sharded_param_size.numel() for p in params]
            waits: torch.Tensor | None = self._group._prepare_partial_reduce_output(
                params, sizes, output.dtype
            )
            return waits
        if self.partial is not None and self._partial_of not in (None, self.current):
            raise UserError(
                "other parameters have gradients than in the microbatch before, which waits for its "
                "all-reduce: call set_reduce_scatter_unused_params(True) (torch 2.13 and newer)"
            )
        return self.partial

    def keep(self, partial: torch.Tensor) -> None:
        """Let `partial` wait for the all-reduce of a later exchange of `current`."""
        self._kept, self._partial_of = partial, self.current

    def reduce_scatter_by(self, comm: ReduceScatter) -> ReduceScatter:
        """Replace the reduce-scatter by `comm`; returns the replaced one."""
        before: ReduceScatter = self._get("_reduce_scatter_comm")
        self._comm = comm
        self._set("_reduce_scatter_comm", comm)
        return before

    def all_reduce_by(self, all_reduce: Callable[[torch.Tensor], bool]) -> None:
        """Replace the all-reduce between replicas by `all_reduce`; FSDP2 then runs none of its own.

        It returns whether it has reduced the tensor. A hook that the user sets later runs after it, as after
        FSDP2's own all-reduce.
        """

        def hook(output: torch.Tensor) -> None:
            if all_reduce(output) and self._later is not None:
                self._later(output)

        self._hook = hook
        info = self._get("mesh_info")
        if isinstance(info, HSDPMeshInfo):
            fields = [field.name for field in dataclasses.fields(FSDPMeshInfo) if field.init]
            values = {name: getattr(info, name) for name in fields}
            alone = FSDPMeshInfo(**values | {"replicate_mesh_dim": None})
            alone.reduce_scatter_process_group = getattr(info, "reduce_scatter_process_group", None)
            # Other mesh information means that the forward pass reshards to another number of ranks.
            if self._get("post_forward_mesh_info") is info:
                self._set("post_forward_mesh_info", alone)
            self._set("mesh_info", alone)
        self._set("_all_reduce_hook", hook)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, detached; another tensor is returned whole."""
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def groups_of(model: nn.Module) -> Iterator[ParamGroup]:
    """Yield the parameter groups of all modules of a model to which `fully_shard` was applied.

    Raises:
        UserError: this release of torch keeps them elsewhere.
    """
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        elif hasattr(state, "_fsdp_param_group"):  # Up to torch 2.11 a module has one group, or None.
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        else:
            raise UserError(
                f"torch {torch.__version__}: FSDP2's {type(state).__name__} has no _fsdp_param_groups; this "
                "release is not supported"
            )
        for group in groups:
            if id(group) not in seen:  # Modules that are sharded in one call share a group.
                seen.add(id(group))
                yield ParamGroup(module, group)
