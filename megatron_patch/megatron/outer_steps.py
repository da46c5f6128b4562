"""Outer steps between Megatron's optimizer instances, which otherwise train by themselves: DiLoCo.

With `compression.outer_interval` H > 1, each of the K instances of the distributed optimizer
(--num-distributed-optimizer-instances) reduces its gradients and gathers its weights among its own ranks
alone. After every H-th optimizer step each rank exchanges its shard with the ranks that own it in the other
instances (arXiv 2311.08105, algorithm 1, with the Nesterov momentum of torch.optim.SGD):

    d_k = anchor - master_k                 how far instance k has moved, in fp32
    D   = (1/K) * sum over k of d_k         in fp32, or in the job's codes with error feedback
    v  <- momentum*v + D
    anchor <- anchor - rate*(D + momentum*v)
    master_k <- anchor                      on all instances

`master_k` are the optimizer's fp32 weights. Adam's states are never exchanged. This is another training than
that of one optimizer. Its weights are the same on all instances only after an outer step.

With `compression.outer_delay` D > 0 buckets are exchanged in H // D turns, spread over the H steps. A turn's
exchange overlaps with the next D forward and backward passes, and ends before the optimizer step of the last
of them (outer_shard.py).
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import Exchange, Traffic
from megatron_patch.collectives.makers import make_all_reduces
from megatron_patch.errors import UserError
from megatron_patch.megatron import patching
from megatron_patch.megatron.outer_shard import Shard
from megatron_patch.megatron.seams.gradients import contents_of
from megatron_patch.megatron.seams.optimizer_step import Masters, distributed_leaves, leaves_of, masters_of
from megatron_patch.megatron.seams.weights import ChunkWeights, gathered_after
from megatron_patch.session.session import Session

logger = logging.getLogger(__name__)


class OuterSteps:
    """The outer steps of one model chunk, whose bucket groups it makes exchange within their instance alone.

    It must be created before the seams of the bucket groups, and is attached until `detach`.

    Args:
        chunk: the DDP instance of Megatron.
        session: the chunk's session.
    """

    def __init__(self, chunk: Any, session: Session) -> None:
        self._chunk = weakref.ref(chunk)  # A strong reference would keep an attached model alive.
        self.session, self.config = session, session.config
        self.steps = 0
        """The optimizer steps since the last interval, skipped ones too, as all instances count them."""
        self.waited = 0
        """The optimizer steps that have begun since an exchange has started."""
        self.sent = Traffic()  # By the last optimizer step.
        self.loaded: dict[str, torch.Tensor] = {}
        """The `state` of a checkpoint, which the next step begins from."""
        self._instance: int = chunk.inter_dist_opt_group.rank()
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        self.instances: int = chunk.ddp_config.num_distributed_optimizer_instances
        self._shards = [shard for group in groups for shard in self._shards_of(group)]
        self.turns = self._in_turns()
        """The shards whose exchange starts after so many optimizer steps of an interval."""
        self._overrides = [override for group in groups for override in self._separated(group)]

    def _shards_of(self, group: Any) -> list[Shard]:
        between = group.inter_distributed_optimizer_instance_group
        inside = group.intra_distributed_optimizer_instance_group
        sizes = [bucket.grad_data.numel() // inside.size() for bucket in group.buckets]
        starts = [inside.rank() * size for size in sizes]
        exchanges: Sequence[Exchange | None] = [None] * len(sizes)
        if self.config.compresses:
            parts = zip(group.buckets, starts, sizes, strict=True)
            contents = [contents_of(bucket).part(start, size) for bucket, start, size in parts]
            exchanges = make_all_reduces(contents, between, self.session.setup, one_hop=True).exchanges
        shards = zip(group.buckets, starts, sizes, exchanges, strict=True)
        return [Shard(bucket, between, *rest) for bucket, *rest in shards]

    def _in_turns(self) -> dict[int, list[Shard]]:
        interval = self.config.outer_interval
        turns = interval // (self.config.outer_delay or interval)
        starts = [interval * (turn + 1) // turns for turn in range(turns)]
        found: dict[int, list[Shard]] = {start: [] for start in starts}
        before, total = 0, sum(shard.numel for shard in self._shards)
        for shard in self._shards:  # A bucket is not split: the turn in which its middle lies has all of it.
            found[starts[(2 * before + shard.numel) * turns // (2 * total)]].append(shard)
            before += shard.numel
        return found

    def _separated(self, group: Any) -> Iterator[patching.Override]:
        """Have a bucket group reduce over the ranks of its instance, as if the job had no other instance."""
        alone = dataclasses.replace(group.ddp_config, num_distributed_optimizer_instances=1)
        yield patching.override(group, "ddp_config", alone)
        for bucket in group.buckets if not alone.average_in_collective else ():
            # The factor divides by the number of ranks of all instances.
            factor = bucket.gradient_scaling_factor * self.instances
            yield patching.override(bucket, "gradient_scaling_factor", factor)

    @property
    def chunk(self) -> Any:
        return self._chunk()

    @property
    def begun(self) -> bool:
        """Whether a step has begun, and the weights before it are the first anchor."""
        return all(shard.anchor is not None for shard in self._shards)

    def detach(self) -> None:
        if self.begun and dist.get_rank() == 0:
            logger.warning(
                "megatron-loco: optimizer instances have trained apart: their Adam states differ, and so do "
                "weights, by %d steps; load a checkpoint before they train together",
                self.steps,
            )
        for override in self._overrides:
            override.undo()

    def forget(self) -> None:
        """Begin anew from the weights that the next step finds, as after a checkpoint was loaded."""
        self.steps = 0
        for shard in self._shards:
            shard.anchor = shard.velocity = shard.under_way = None

    def begin(self, masters: Masters, optimizer: Any) -> None:
        """Remember the weights before the first step, which are equal on all instances."""
        for shard in self._shards:
            shard.anchor = shard.weights(masters, self.session.device)
            shard.velocity = torch.zeros_like(shard.anchor) if self.config.outer_momentum else None
        if self.loaded:
            mine = self.state(optimizer)
            for name in mine.keys() & self.loaded.keys():  # Another codec has no such errors.
                mine[name].copy_(self.loaded[name])
            self.loaded = {}

    def layout(self) -> list[list[int]]:
        """Return what must be equal where `state` is loaded: the instances, this one, and its shards."""
        shards = [[s.bucket.grad_data.numel(), s.start, s.numel] for s in self._shards]
        return [[self.instances, self._instance], *shards]

    def state(self, optimizer: Any) -> dict[str, torch.Tensor]:
        """Return by name, not copied, what Megatron's checkpoint does not have right after an outer step.

        Megatron takes Adam's states to be equal on all instances, and saves those of some rank.
        """
        adam, found = _adam_of(optimizer), {}
        for number, shard in enumerate(self._shards):
            if shard.velocity is not None:
                found[f"{number}.velocity"] = shard.velocity
            for place, parameter in enumerate(shard.bucket.params_list):
                for name, tensor in adam.get(parameter, {}).items():
                    found[f"{number}.{place}.{name}"] = tensor
            for place, sender in enumerate(shard.exchange.senders if shard.exchange else ()):
                for name, tensor in sender.state().items():
                    found[f"{number}.error.{place}.{name}"] = tensor
        return found

    @property
    def under_way(self) -> bool:
        """Whether an exchange has started whose result the weights do not have yet."""
        return any(shard.under_way is not None for shard in self._shards)

    @property
    def squares(self) -> torch.Tensor:
        """The squared norms of d_k and of D over this rank's shards, each in its last exchange, fp64 [2]."""
        none = torch.zeros(2, dtype=torch.float64, device=self.session.device)
        return sum((shard.squares for shard in self._shards if shard.squares is not None), start=none)

    def step(self, masters: Masters) -> None:
        """Make an outer step of all shards: write its result into the fp32 weights."""
        compresses = self._begin_exchange(masters, self._shards)
        self.steps = 0
        for shard in self._shards:  # Buffers of only one shard exist at a time.
            shard.send(masters, compresses)
            self._receive(shard, masters)

    def start(self, masters: Masters) -> None:
        """Start the exchange of the shards whose turn it is, in the background until `receive`."""
        turn = self.turns[self.steps]
        compresses = self._begin_exchange(masters, turn)
        self.waited, self.steps = 0, self.steps % self.config.outer_interval
        for shard in turn:
            shard.send(masters, compresses)

    def advance(self, masters: Masters) -> None:
        """Called before an optimizer's step: go on with the exchange that is under way, or end it."""
        self.waited += 1
        if self.waited == self.config.outer_delay:
            self.receive(masters)
        elif self.waited == self.config.outer_delay // 2:
            for shard in self._shards:
                shard.advance()

    def receive(self, masters: Masters) -> None:
        """End the exchange that is under way, and write its result into the fp32 weights."""
        for shard in self._shards:
            if shard.under_way is not None:
                self._receive(shard, masters)

    def _begin_exchange(self, masters: Masters, shards: Sequence[Shard]) -> bool:
        compresses = self._agreed([master for master, _ in masters.values()])
        self.sent = sum((shard.traffic(compresses) for shard in shards), start=Traffic())
        return compresses

    def _receive(self, shard: Shard, masters: Masters) -> None:
        shard.receive(masters, self.config.outer_rate, self.config.outer_momentum)

    def finish(self, masters: Masters) -> None:
        """Make the weights of all instances equal."""
        if self.under_way:
            self.receive(masters)
        if self.steps or len(self.turns) > 1:
            self.step(masters)

    def traffic(self) -> Traffic:
        """Return what this rank sends in an interval, in low bits if it compresses now."""
        return sum((shard.traffic(self.session.active) for shard in self._shards), start=Traffic())

    def _agreed(self, weights: Sequence[torch.Tensor]) -> bool:
        """Agree with all ranks of the model whether to compress, and that all weights are finite.

        Raises:
            RuntimeError: on all ranks, if weights of an instance are not finite. No weight has changed then.
        """
        chunk = self.chunk
        found = torch.zeros(self.instances + 1, device=self.session.device)
        if weights:
            norms = torch.stack(torch._foreach_norm(list(weights), 1))
            found[self._instance] = (~torch.isfinite(norms)).any()
        found[-1] = not self.session.active
        pipeline = chunk.pp_group if isinstance(chunk.pp_group, list) else [chunk.pp_group]
        for group in (chunk.dp_cp_group, chunk.tp_group, *pipeline):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        *bad, inactive = found.tolist()
        if any(bad):
            names = ", ".join(str(number) for number, flag in enumerate(bad) if flag)
            raise RuntimeError(
                f"megatron-loco: weights of optimizer instance {names} (counted from 0) are NaN or infinite "
                "at an outer step, and were not averaged: resume from the last checkpoint"
            )
        return not inactive


def _adam_of(optimizer: Any) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    """Return Adam's states of the model parameters of which this rank updates a part."""
    states = {
        id(p): state for leaf in distributed_leaves(optimizer) for p, state in leaf.optimizer.state.items()
    }
    return {
        parameter: {n: t for n, t in states.get(id(master), {}).items() if isinstance(t, torch.Tensor)}
        for parameter, (master, _) in masters_of(optimizer).items()
    }


_Due = tuple[OuterSteps, ChunkWeights, Callable[[Masters], None]]
"""Outer steps that are due, with what they must do with the fp32 weights."""


@torch.no_grad()
def begin_step(optimizer: Any, outer: Sequence[OuterSteps]) -> None:
    """Called before an optimizer's step, with the outer steps of the chunks that it updates."""
    for one in outer:
        if not one.begun:
            one.begin(masters_of(optimizer), optimizer)
        if one.under_way:  # The optimizer's step writes the model's weights from fp32, and gathers them.
            one.advance(_masters_of(one, optimizer))


@torch.no_grad()
def end_step(optimizer: Any, outer: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Called after an optimizer's step: make or start the outer steps that are due.

    Raises:
        UserError: the optimizers of one model are stepped one by one.
    """
    due: list[_Due] = []
    for one, weights in outer:
        if one.session.ledger.joins(leaves_of(optimizer)):
            raise UserError(
                "compression.outer_interval needs one step of all of a model's optimizers at once: call "
                "step() of the optimizer that get_megatron_optimizer returns, not of those that it chains"
            )
        one.steps, one.sent = one.steps + 1, Traffic()
        if one.steps not in one.turns:
            continue
        if one.config.outer_delay:
            one.start(_masters_of(one, optimizer))
        else:
            due.append((one, weights, one.step))
    _write(optimizer, due)
    for one, _ in outer:
        one.session.count(one.sent)


@torch.no_grad()
def finish(optimizer: Any, outer: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Make an outer step, as before a checkpoint, unless the last optimizer step has made one."""
    due = [(one, weights, one.finish) for one, weights in outer if one.steps or one.under_way]
    if due:
        if (steps := due[0][0].steps) and dist.get_rank() == 0:
            line = "megatron-loco: an outer step before the checkpoint, %d optimizer steps after the last one"
            logger.info(line, steps)
        _write(optimizer, due)  # It belongs to no step, whose report would count what it sends.
        for one, *_ in due:
            one.chunk.start_param_sync(force_sync=True)


def _masters_of(one: OuterSteps, optimizer: Any) -> Masters:
    return {p: found for p, found in masters_of(optimizer).items() if p in one.chunk.param_to_bucket_group}


def _write(optimizer: Any, due: Sequence[_Due]) -> None:
    """Have outer steps write into the fp32 weights, and gather the weights again."""
    if not due:
        return

    def write() -> None:
        for one, _, into in due:
            into(_masters_of(one, optimizer))
        for leaf in distributed_leaves(optimizer):
            leaf._copy_main_params_to_model_params()
        for one, *_ in due:
            if not one.chunk.ddp_config.overlap_param_gather:  # With it, the next forward pass gathers.
                one.chunk.start_param_sync()

    gathered_after([weights for _, weights, _ in due], write)
