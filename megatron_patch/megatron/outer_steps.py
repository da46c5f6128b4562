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
that of one optimizer. Its weights are the same on all instances only after an outer step. Where the first
weights differ between instances, all take their mean (`begin`).

With `compression.outer_delay` D > 0 buckets are exchanged in H // D turns, spread over the H steps. A turn's
exchange overlaps with the next D forward and backward passes, and ends before the optimizer step of the last
of them (`Shard`). The instance makes D - 1 optimizer steps meanwhile, whose updates are kept. (Streaming
DiLoCo, arXiv 2501.18512, delays too, but takes a weighted mean of the instance's weights and the anchor.)

    send       before = master_k;  d_k = anchor - before
    receive    anchor steps by D, the mean of d_k;  master_k <- anchor + (master_k - before)

In checkpoints (`packed`, `restore`): Megatron takes all optimizer instances to be equal, and saves the
weights and Adam's states of some. Right after an outer step the weights are equal, and the anchor; Megatron's
own training loop has one made before it saves (checkpoint/training_loop.py). A rank adds one tensor of bytes:
the outer momentum, the errors of the exchange, and its Adam states. A run with as many ranks, placed alike,
continues from them as if it had not been interrupted. Others, and stock Megatron, start from the saved
weights and Adam states.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduceHandle
from megatron_patch.collectives.exchange import Exchange, Handle, Traffic, all_reduced
from megatron_patch.collectives.makers import make_all_reduces
from megatron_patch.errors import UserError
from megatron_patch.megatron import patching
from megatron_patch.megatron.seams.gradients import contents_of
from megatron_patch.megatron.seams.optimizer_step import Masters, distributed_leaves, leaves_of, masters_of
from megatron_patch.megatron.seams.weights import ChunkWeights, gathered_after
from megatron_patch.session.session import Session
from megatron_patch.session.states import Damaged
from megatron_patch.weights.gather import coder_of

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
        """The steps since the last interval, as all instances count them: also those that the optimizer
        skipped, or the loop (`make_up`)."""
        self.started = 0
        """`steps` when the exchange has started that is under way."""
        self.optimizer: Callable[[], Any] = lambda: None
        """Returns the optimizer, once a step has begun."""
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
        self.session.of_weights += [exchange for exchange in exchanges if exchange is not None]
        shards = zip(group.buckets, starts, sizes, exchanges, strict=True)
        return [Shard(bucket, between, *rest) for bucket, *rest in shards]

    def _in_turns(self) -> dict[int, list[Shard]]:
        interval = self.config.outer_interval
        turns = interval // (self.config.outer_delay or interval)
        starts = [interval * (turn + 1) // turns for turn in range(turns)]
        by_start: dict[int, list[Shard]] = {start: [] for start in starts}
        before, total = 0, sum(shard.numel for shard in self._shards)
        for shard in self._shards:  # A bucket is not split: the turn in which its middle lies has all of it.
            by_start[starts[(2 * before + shard.numel) * turns // (2 * total)]].append(shard)
            before += shard.numel
        return by_start

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
        self.steps = self.session.unstepped = 0
        self.session.clear_errors()
        for shard in self._shards:
            shard.anchor = shard.velocity = shard.under_way = None

    def begin(self, masters: Masters, optimizer: Any) -> None:
        """Remember the weights before the first step, and make them equal on all instances: their mean."""
        self._agreed([master for master, _ in masters.values()])  # NaN is averaged nowhere.
        unlike = torch.zeros(1, device=self.session.device)
        for shard in self._shards:
            shard.anchor = shard.weights(masters, self.session.device)
            shard.velocity = torch.zeros_like(shard.anchor) if self.config.outer_momentum else None
            unlike += shard.made_equal(masters)
        self._most(unlike)
        if unlike.any() and dist.get_rank() == 0:
            logger.warning(
                "megatron-loco: outer steps begin, and weights differ between optimizer instances: all take "
                "their mean"
            )
        if self.config.outer_momentum:
            self._agree_on_velocity()
        if self.loaded:
            mine = self.state(optimizer)
            for name in mine.keys() & self.loaded.keys():
                if mine[name].shape == self.loaded[name].shape:  # Errors of other codes have other ones.
                    mine[name].copy_(self.loaded[name])
            self.loaded = {}
        self.optimizer = weakref.ref(optimizer)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what outer steps keep on the device, without errors, and without what is being exchanged."""
        for shard in self._shards:
            before = None if shard.under_way is None else shard.under_way.before
            yield from (t for t in (shard.anchor, shard.velocity, before) if t is not None)

    def _agree_on_velocity(self) -> None:
        """Forget the loaded v of a shard unless all its owners have one: their weights would part."""
        for group in dict.fromkeys(shard.group for shard in self._shards):
            lost = torch.tensor(float(not self.loaded), device=self.session.device)
            dist.all_reduce(lost, op=dist.ReduceOp.MAX, group=group)
            for number, shard in enumerate(self._shards if lost else ()):
                if shard.group is group:
                    self.loaded.pop(f"{number}.velocity", None)

    def layout(self) -> list[list[int]]:
        """Return what must be equal where `state` is loaded: the instances, this one, and its shards."""
        shards = [[s.bucket.grad_data.numel(), s.start, s.numel] for s in self._shards]
        return [[self.instances, self._instance], *shards]

    def state(self, optimizer: Any) -> dict[str, torch.Tensor]:
        """Return by name, not copied, what Megatron's checkpoint does not have right after an outer step.

        Megatron takes Adam's states to be equal on all instances, and saves those of some rank.
        """
        adam, tensors = _adam_of(optimizer), {}
        for number, shard in enumerate(self._shards):
            if shard.velocity is not None:
                tensors[f"{number}.velocity"] = shard.velocity
            for place, parameter in enumerate(shard.bucket.params_list):
                for name, tensor in adam.get(parameter, {}).items():
                    tensors[f"{number}.{place}.{name}"] = tensor
            for place, sender in enumerate(shard.exchange.senders if shard.exchange else ()):
                for name, tensor in sender.state().items():
                    tensors[f"{number}.error.{place}.{name}"] = tensor
        return tensors

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
        self.started = self.steps = self.steps % self.config.outer_interval
        for shard in turn:
            shard.send(masters, compresses)

    def advance(self, masters: Masters) -> None:
        """Called before a step: go on with the exchange that is under way, or end it."""
        begun = self.steps + 1 - self.started
        if begun == self.config.outer_delay:
            self.receive(masters)
        elif begun == self.config.outer_delay // 2:
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
        flags = torch.zeros(self.instances + 1, device=self.session.device)
        if weights:
            norms = torch.stack(torch._foreach_norm(list(weights), 1))
            flags[self._instance] = (~torch.isfinite(norms)).any()
        flags[-1] = not self.session.active
        self._most(flags)
        *bad, inactive = flags.tolist()
        if any(bad):
            names = ", ".join(str(number) for number, flag in enumerate(bad) if flag)
            raise RuntimeError(
                f"megatron-loco: weights of optimizer instance {names} (counted from 0) are NaN or infinite "
                "at an outer step, and were not averaged: resume from the last checkpoint"
            )
        return not inactive

    def _most(self, flags: torch.Tensor) -> None:
        """Take the maximum over all ranks of the model."""
        chunk = self.chunk
        pipeline = chunk.pp_group if isinstance(chunk.pp_group, list) else [chunk.pp_group]
        try:
            for group in (chunk.dp_cp_group, chunk.tp_group, *pipeline):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:  # Of gloo and of NCCL with blocking waits; a peer may have died, too.
            if not re.search("time.?out|timed out|timing out", str(error), re.IGNORECASE):
                raise
            raise RuntimeError(
                f"megatron-loco: not all ranks came to an outer step ({error}). Unless one has ended: where "
                "an instance's loop makes no optimizer step, it must call megatron_patch.skip_step(model)"
            ) from error


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
def begin_step(optimizer: Any, of_chunks: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Called before an optimizer's step, with the outer steps of the chunks that it updates."""
    for outer, _ in of_chunks:
        outer.session.memory.bring_back()
        if not outer.begun:
            outer.begin(masters_of(optimizer), optimizer)
    make_up(optimizer, of_chunks)
    _advance(optimizer, of_chunks)


def _advance(optimizer: Any, of_chunks: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    for outer, _ in of_chunks:
        if outer.under_way:  # The optimizer's step writes the model's weights from fp32, and gathers them.
            outer.advance(_masters_of(outer, optimizer))


@torch.no_grad()
def make_up(optimizer: Any, of_chunks: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Count the steps that the loop has skipped without the optimizer, and do what was due in them.

    It is called when gradients are dropped, and at the latest before the optimizer's next step. Chunks of a
    virtual pipeline count a step together: instances that make it exchange them in this order.
    """
    while of_chunks and all(outer.session.unstepped for outer, _ in of_chunks):
        for outer, _ in of_chunks:
            outer.session.unstepped -= 1
            outer.session.memory.bring_back()
        _advance(optimizer, of_chunks)
        end_step(optimizer, of_chunks)


@torch.no_grad()
def end_step(optimizer: Any, of_chunks: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Called after an optimizer's step: make or start the outer steps that are due.

    Raises:
        UserError: the optimizers of one model are stepped one by one.
    """
    due: list[_Due] = []
    for outer, weights in of_chunks:
        if outer.session.ledger.joins(leaves_of(optimizer)):
            raise UserError(
                "compression.outer_interval needs one step of all of a model's optimizers at once: call "
                "step() of the optimizer that get_megatron_optimizer returns, not of those that it chains"
            )
        outer.steps, outer.sent = outer.steps + 1, Traffic()
        if outer.steps not in outer.turns:
            continue
        if outer.config.outer_delay:
            outer.start(_masters_of(outer, optimizer))
        else:
            due.append((outer, weights, outer.step))
    _write(optimizer, due)
    for outer, _ in of_chunks:
        outer.session.count(outer.sent)


@torch.no_grad()
def finish(optimizer: Any, of_chunks: Sequence[tuple[OuterSteps, ChunkWeights]]) -> None:
    """Make an outer step, as before a checkpoint, unless the last optimizer step has made one."""
    for outer, _ in of_chunks:
        outer.session.memory.bring_back()
    due = [(outer, weights, outer.finish) for outer, weights in of_chunks if outer.steps or outer.under_way]
    if due:
        if (steps := due[0][0].steps) and dist.get_rank() == 0:
            line = "megatron-loco: an outer step before the checkpoint, %d optimizer steps after the last one"
            logger.info(line, steps)
        _write(optimizer, due)  # It belongs to no step, whose report would count what it sends.
        for outer, *_ in due:
            outer.chunk.start_param_sync(force_sync=True)


def _masters_of(outer: OuterSteps, optimizer: Any) -> Masters:
    return {p: m for p, m in masters_of(optimizer).items() if p in outer.chunk.param_to_bucket_group}


def _write(optimizer: Any, due: Sequence[_Due]) -> None:
    """Have outer steps write into the fp32 weights, and gather the weights again."""
    if not due:
        return

    def write() -> None:
        for outer, _, into in due:
            into(_masters_of(outer, optimizer))
        for leaf in distributed_leaves(optimizer):
            leaf._copy_main_params_to_model_params()
        for outer, *_ in due:
            if not outer.chunk.ddp_config.overlap_param_gather:  # With it, the next forward pass gathers.
                outer.chunk.start_param_sync()

    gathered_after([weights for _, weights, _ in due], write)


def outer_step(
    anchor: torch.Tensor,
    velocity: torch.Tensor | None,
    difference: torch.Tensor,
    rate: float,
    momentum: float,
) -> None:
    """Take one step of SGD with Nesterov momentum in place: v <- momentum*v + D, then anchor -= rate*(D +
    momentum*v).

    All tensors are fp32 of one shape; `difference` is D, the mean of `anchor - master` over the instances.
    `velocity` is v, and None without momentum.
    """
    anchor.add_(difference, alpha=-rate)
    if velocity is not None:
        velocity.mul_(momentum).add_(difference)
        anchor.add_(velocity, alpha=-rate * momentum)


@dataclass
class _Sent:
    """An exchange under way."""

    before: torch.Tensor
    """The fp32 weights from which the difference was taken, [numel]."""
    difference: torch.Tensor
    """d_k, fp32 [numel], over which D is written."""
    moved: torch.Tensor
    """The norm of d_k, fp64."""
    handle: Handle
    divisor: int
    """What the result of `handle` must be divided by."""


@dataclass
class Shard:
    """This rank's shard of one bucket."""

    bucket: Any
    group: dist.ProcessGroup
    """The ranks that own this shard, one in each instance."""
    start: int
    """Where in the bucket the shard begins."""
    numel: int
    exchange: Exchange | None
    """The exchange in low bits; None with method none."""
    anchor: torch.Tensor | None = None
    velocity: torch.Tensor | None = None  # It stays None without momentum.
    under_way: _Sent | None = None
    squares: torch.Tensor | None = None
    """The squared norms of d_k and of D in the last exchange, fp64 [2]."""

    def pieces(self, masters: Masters) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the fp32 weights in this shard, and their places in it."""
        for parameter in self.bucket.params_list:
            if parameter in masters:
                master, start = masters[parameter]
                first = start - self.start
                yield master.view(-1), slice(first, first + master.numel())

    def weights(self, masters: Masters, device: torch.device) -> torch.Tensor:
        """Return the fp32 weights as one tensor, [numel], with 0 where the bucket has padding."""
        weights = torch.zeros(self.numel, device=device)
        for master, here in self.pieces(masters):
            weights[here] = master
        return weights

    def made_equal(self, masters: Masters) -> bool:
        """Compare the anchor between instances, and take the mean if it differs; returns whether it does."""
        assert self.anchor is not None
        sums = coder_of(self.anchor.device).sums(self.anchor.view(torch.int16))
        ends = torch.cat([sums, ~sums])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if bool((ends[:2] == ~ends[2:]).all()):  # The largest is the smallest.
            return False
        dist.all_reduce(self.anchor, group=self.group)
        self.anchor /= self.group.size()
        for master, here in self.pieces(masters):
            master.copy_(self.anchor[here])
        return True

    def traffic(self, compresses: bool) -> Traffic:
        """Return what this rank sends in an exchange."""
        if self.anchor is None:
            return Traffic()
        if self.exchange is None or not compresses:
            return all_reduced(self.anchor, self.group)
        return self.exchange.traffic(self.anchor).between

    def send(self, masters: Masters, compresses: bool) -> None:
        """Start the exchange of how far this instance has moved, in low bits if `compresses`."""
        assert self.anchor is not None
        before = self.weights(masters, self.anchor.device)
        difference = self.anchor - before
        moved = torch.linalg.vector_norm(difference, dtype=torch.float64)
        if self.exchange is None or not compresses:
            work = dist.all_reduce(difference, group=self.group, async_op=True)
            self.under_way = _Sent(before, difference, moved, work, self.group.size())
            return
        for sender in self.exchange.senders:
            sender.measures = False  # The statistics that are reported are of gradients.
        handle = self.exchange.start(difference, difference, average=True)
        self.under_way = _Sent(before, difference, moved, handle, 1)

    def advance(self) -> None:
        """Start the second half of an exchange in low bits, so that it overlaps with the next steps, too."""
        if self.under_way is not None and isinstance(self.under_way.handle, AllReduceHandle):
            self.under_way.handle.advance()

    def receive(self, masters: Masters, rate: float, momentum: float) -> None:
        """End the exchange, and write the fp32 weights."""
        assert self.anchor is not None
        assert self.under_way is not None
        sent, self.under_way = self.under_way, None
        sent.handle.wait()
        sent.difference /= sent.divisor
        mean = torch.linalg.vector_norm(sent.difference, dtype=torch.float64)
        self.squares = torch.stack([sent.moved, mean]).square()
        outer_step(self.anchor, self.velocity, sent.difference, rate, momentum)
        for master, here in self.pieces(masters):
            # Without a delay the difference is 0, and all instances take the anchor itself.
            master.sub_(sent.before[here]).add_(self.anchor[here])


def packed(of_chunks: list[OuterSteps], optimizer: Any) -> torch.Tensor:
    """Return the states of this rank's chunks and a CRC-32 of them, uint8 on CPU."""
    late = any(outer.steps or outer.under_way for outer in of_chunks)
    if late and dist.get_rank() == 0:
        logger.warning(
            "megatron-loco: saved between outer steps, %d optimizer steps after one: the checkpoint mixes "
            "the weights of all optimizer instances; save after a multiple of compression.outer_interval%s",
            of_chunks[0].steps,
            ", without compression.outer_delay" if of_chunks[0].config.outer_delay else "",
        )
    buffer, kept = io.BytesIO(), []
    for outer in of_chunks:
        outer.session.memory.bring_back()
        state = {} if late else outer.state(optimizer)
        kept.append((outer.layout(), {name: tensor.detach().cpu().clone() for name, tensor in state.items()}))
    torch.save(kept, buffer)
    buffer.write(zlib.crc32(buffer.getbuffer()).to_bytes(4, "little"))
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def restore(of_chunks: list[OuterSteps], read: Callable[[], torch.Tensor | None], folder: str | Path) -> None:
    """Have the next step begin from the states in a checkpoint; `read` returns them, or None without any.

    Raises:
        UserError: the states are damaged, and `strict_load` is set.
    """
    level, why, saved = logging.INFO, "the checkpoint has none", []
    try:
        if (data := read()) is not None:
            content = data.numpy().tobytes()
            if content[-22:-18] == b"PK\5\6":  # What torch.save writes ends so: no CRC follows.
                why = "the checkpoint is of an earlier release"
            elif zlib.crc32(content[:-4]).to_bytes(4, "little") != content[-4:]:
                raise Damaged("its states of outer steps have changed since they were saved")
            else:
                why = "the checkpoint's ranks were placed otherwise"
                saved = torch.load(io.BytesIO(content[:-4]), weights_only=True)  # noqa: TID251
    except Damaged as problem:
        level, why = logging.WARNING, f"{folder}: {problem}"
        if of_chunks[0].config.strict_load:
            raise UserError(f"{why}; without compression.strict_load they would begin anew") from problem
    fits = [layout for layout, _ in saved] == [outer.layout() for outer in of_chunks]
    for place, outer in enumerate(of_chunks):
        outer.forget()
        outer.loaded = saved[place][1] if fits else {}
    if not fits and (dist.get_rank() == 0 or level != logging.INFO):
        logger.log(level, "megatron-loco: outer steps begin anew, without errors and momentum: %s", why)
