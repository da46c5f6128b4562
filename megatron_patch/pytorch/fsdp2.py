"""Low-bit exchanges of FSDP2's gradients, flat or hybrid.

    flat      the reduce-scatter of a parameter group's gradients over the shard group is in low bits
    hybrid    the reduce-scatter over the shard group is FSDP2's own, uncompressed; the all-reduce of the
              reduced shard between replicas is in low bits

Hybrid is a mesh of two dimensions for `fully_shard`, or a shard mesh with the caller's `replicate_group`.
FSDP2 exchanges only parameters that have gradients, so that with frozen or unused parameters a group may
exchange different sets of them: each set has an exchange and errors of its own, made when it first occurs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_patch.collectives.exchange import Exchange, all_reduced, reduce_scattered
from megatron_patch.collectives.makers import Reduction, make_all_reduces, make_reduce_scatters
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.pytorch.contents import Sharded, contents_of, plain_name
from megatron_patch.pytorch.fsdp2_fields import ParamGroup, ReduceScatter, groups_of, local_of
from megatron_patch.quantization.blocks import Contents
from megatron_patch.session import torch_steps
from megatron_patch.session.session import Session
from megatron_patch.session.states import Exchanged

logger = logging.getLogger(__name__)

MOST_SETS = 16
"""The most sets of parameters that a group may exchange: each has errors of its own."""


class Sets:
    """The exchanges of one parameter group, one for each set of parameters that it has exchanged.

    Args:
        group: FSDP2's parameter group.
        names: the names of its parameters in checkpoints.
        session: the model's session.
        ranks: the process group that exchanges.
    """

    def __init__(
        self, group: ParamGroup, names: Sequence[str], session: Session, ranks: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.names = names
        self.reductions: dict[tuple[int, ...], Reduction] = {}
        self._session = session
        self._ranks = ranks
        group.note_what_is_exchanged(self._tell)

    def _tell(self, what: str) -> None:
        if self._session.ledger.announces:
            logger.warning("megatron-loco: %s: %s", type(self.group.module).__name__, what)

    def exchange(self, numel: int) -> Exchange:
        """Return the exchange for the set of parameters that is exchanged now. All ranks must call it.

        Raises:
            UserError: torch exchanges other parameters than is known; or there are more than MOST_SETS sets.
        """
        current = self.group.current
        if current not in self.reductions:
            if self.contents(current).numel != numel:
                raise UserError(
                    f"torch {torch.__version__}: FSDP2 exchanges {numel:,} gradients of a group, and not "
                    "those that were expected; this release is not supported"
                )
            if len(self.reductions) == MOST_SETS:
                raise UserError(
                    f"FSDP2 has exchanged more than {MOST_SETS} sets of parameters of one group: call "
                    "set_reduce_scatter_unused_params(True), so that every exchange is of all of them (torch "
                    "2.13 and newer)"
                )
            self.make(current)
        return self.reductions[current].exchanges[0]

    def make(self, current: tuple[int, ...]) -> None:
        """Create the exchange for a set of parameter numbers. All ranks must call it."""
        if current not in self.reductions:
            self.reductions[current] = reduction = self._make(self.contents(current))
            self._session.exchanges += reduction.exchanges

    def prepare(self, sets: Sequence[Sequence[str]]) -> None:
        """Create the exchanges for those of a checkpoint's sets of names that are of this group."""
        numbers = {name: number for number, name in enumerate(self.names)}
        trained = {
            name for name, tensor in zip(self.names, self.group.tensors, strict=True) if tensor.requires_grad
        }
        for names in sets:
            if names and trained >= set(names):
                self.make(tuple(numbers[name] for name in names))

    def exchanged(self) -> Iterator[Exchanged]:
        """Yield every exchange, for checkpoints."""
        for current, reduction in self.reductions.items():
            shapes = {self.names[n]: self.group.parameters[n].shape for n in current}
            for exchange in reduction.exchanges:
                yield Exchanged(exchange, shapes, self.group.divide_factor is None)

    def parameters(self, current: Sequence[int]) -> list[Sharded]:
        parameters = self.group.parameters
        return [parameters[number] for number in current]

    def contents(self, current: Sequence[int]) -> Contents:
        """Return the contents of the tensor that is exchanged for a set."""
        raise NotImplementedError

    def _make(self, contents: Contents) -> Reduction:
        raise NotImplementedError


class Flat(Sets, ReduceScatter):
    """The reduce-scatter of one parameter group over its shard group; implements FSDP2's `ReduceScatter`."""

    def __init__(self, group: ParamGroup, names: Sequence[str], session: Session) -> None:
        super().__init__(group, names, session, group.reduce_scatter_group)
        self._stock = group.reduce_scatter_by(self)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate FSDP2's input or output buffer, as its own reduce-scatter does."""
        return self._stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce [N*S] to this rank's [S]. On CUDA FSDP2 calls it on its reduce-scatter stream."""
        session = self._session
        session.pass_begins(self, scale=torch_steps.loss_scale())
        if not session.active or group.size() == 1 or not session.carries([input_tensor.dtype]):
            session.count(reduce_scattered(input_tensor, group))
            self._stock(output_tensor, input_tensor, group, op, async_op)
            return
        average = op == dist.ReduceOp.AVG
        exchange = self.exchange(input_tensor.numel())
        session.start(exchange, input_tensor, output_tensor, average, self._ranks).wait()
        if not average and op != dist.ReduceOp.SUM:  # It is a PREMUL_SUM by 1 / factor, for NCCL.
            output_tensor.div_(self.group.divide_factor or 1.0)

    def contents(self, current: Sequence[int]) -> Contents:
        return contents_of(self.parameters(current), self._ranks.size())

    def _make(self, contents: Contents) -> Reduction:
        return make_reduce_scatters([contents], self._ranks, self._session.setup)


class Hybrid(Sets):
    """The all-reduce of one parameter group's reduced shard between replicas, as FSDP2's all-reduce hook."""

    def __init__(
        self,
        group: ParamGroup,
        names: Sequence[str],
        session: Session,
        replicas: dist.ProcessGroup,
        check: Callable[[], None],
    ) -> None:
        super().__init__(group, names, session, replicas)
        self._check = check
        group.all_reduce_by(self.all_reduce)

    def all_reduce(self, output: torch.Tensor) -> bool:
        """Reduce [S] between the replicas, in place. On CUDA FSDP2 calls it on its all-reduce stream.

        Returns whether it was reduced: it may wait for the next all-reduce, and FSDP2 then adds zeros to the
        gradient.
        """
        session, replicas = self._session, self._ranks
        if output.is_cuda:  # FSDP2 may free it for the reduce-scatter's stream while this stream reads it.
            output.record_stream(torch.cuda.current_stream())
        shards = self.group.shard_group.size()
        session.count_inside((shards - 1) * output.nbytes)
        waits = self.group.partial_for(output)
        if not self.group.all_reduces:
            self.group.keep(output.clone() if waits is None else waits.add_(output))
            output.zero_()
            return False
        if waits is not None:
            output += waits
        self._check()
        session.pass_begins(self, scale=torch_steps.loss_scale())
        # If a divide factor was set, the reduce-scatter has divided by it, and replicas are summed.
        average = self.group.divide_factor is None
        if not session.active or replicas.size() == 1 or not session.carries([output.dtype]):
            session.count(all_reduced(output, replicas))
            dist.all_reduce(output, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group=replicas)
        else:
            session.start(self.exchange(output.numel()), output, output, average, replicas).wait()
        return True

    def contents(self, current: Sequence[int]) -> Contents:
        shards = self.group.shard_group
        whole = contents_of(self.parameters(current), shards.size())
        size = whole.numel // shards.size()
        return whole.part(shards.rank() * size, size)

    def _make(self, contents: Contents) -> Reduction:
        return make_all_reduces([contents], self._ranks, self._session.setup)


class Fsdp2:
    """An attached model, or part of a model, to which `fully_shard` was applied.

    Args:
        model: the model or part.
        config: the options.
        replicas: the ranks that hold the same shards; None if the model's mesh has this group, or there are
            no replicas.

    Raises:
        UserError: the model is not supported; it is unchanged.
    """

    def __init__(
        self, model: nn.Module, config: CompressionConfig, replicas: dist.ProcessGroup | None
    ) -> None:
        self.asked = config
        self.model = model
        self.groups = list(groups_of(model))
        if not self.groups:
            raise UserError("attach(): fully_shard was applied to no parameter of this model")
        self.shards, self.replicas = _ranks(self.groups, replicas)
        for group in self.groups:
            if group.is_tensor_parallel:
                raise UserError("attach(): tensor-parallel parameters under fully_shard are not served yet")
            if taken := group.is_taken:
                raise UserError(f"attach(): {type(group.module).__name__} has {taken} already; leave it out")
        self.config = config if self.replicas is not None else config.for_flat_fsdp()
        ranks = [group for group in (self.shards, self.replicas) if group is not None]
        self.session = Session(
            self.config,
            self.groups[0].device,
            ranks,
            lambda: (tensor for group in self.groups for tensor in group.tensors),
            lambda: any(t.grad is not None for group in self.groups for t in group.tensors),
        )
        self._unchecked = self.replicas is not None
        names = {id(module): name for name, module in model.named_modules()}
        self.parts: list[Sets] = []
        for group in self.groups:
            mine = [plain_name(f"{names[id(owner)]}.{name}") for owner, name in group.owners]
            if self.replicas is None:
                self.parts.append(Flat(group, mine, self.session))
            else:
                self.parts.append(Hybrid(group, mine, self.session, self.replicas, self._check_replicas))

    def _check_replicas(self) -> None:
        """Check, before the first exchange between replicas, that they have the same weights."""
        if not self._unchecked:
            return
        self._unchecked = False
        assert self.replicas is not None
        tensors = [tensor for group in self.groups for tensor in group.tensors]
        sums = torch.stack([_two_sums(local_of(tensor)) for tensor in tensors]).to(self.session.device)
        ends = torch.stack([sums, -sums])
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=self.replicas)
        unlike = ((ends[0] != -ends[1]) & ~ends.isnan().any(0)).any().int()
        dist.all_reduce(unlike, dist.ReduceOp.MAX, group=self.shards)  # Either all ranks stop, or none does.
        if unlike:
            raise UserError(
                "attach(): replicas begin with unlike weights; with compressed gradients they would stay so: "
                "give all ranks the same seed, or load the same checkpoint on all of them"
            )

    @property
    def waits(self) -> bool:
        """Whether gradients of earlier microbatches wait for their all-reduce."""
        return self.replicas is not None and any(group.partial is not None for group in self.groups)

    def detach(self) -> None:
        for group in self.groups:
            group.restore()

    def where(self) -> str:
        shards = self.shards.size()
        if self.replicas is None:
            return f"FSDP2 reduce-scatter over {shards} ranks"
        return f"FSDP2 all-reduce between {self.replicas.size()} replicas of {shards} shards"

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        replicas = (self.replicas.size(), self.replicas.rank()) if self.replicas else (1, 0)
        return {"shard": (self.shards.size(), self.shards.rank()), "replicate": replicas}

    def prepare(self, sets: Sequence[Sequence[str]]) -> None:
        for part in self.parts:
            part.prepare(sets)

    def exchanged(self) -> list[Exchanged]:
        return [exchange for part in self.parts for exchange in part.exchanged()]

    def elements(self) -> int:
        return sum(p.numel() for group in self.groups for p in group.tensors if p.requires_grad)


def _two_sums(chunk: torch.Tensor) -> torch.Tensor:
    """Return sum and norm in fp64, without a copy of the chunk: activations may leave no room for one."""
    chunk = torch.view_as_real(chunk.detach()) if chunk.is_complex() else chunk.detach()
    return torch.stack([chunk.sum(dtype=torch.float64), torch.linalg.vector_norm(chunk, dtype=torch.float64)])


def _ranks(
    groups: list[ParamGroup], replicas: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the shard group and the replicate group, which all parameter groups of a model must share."""
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
