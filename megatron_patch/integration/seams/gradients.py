"""The seam: one Megatron bucket group's gradients go out in low bits.

`_ParamAndGradBucketGroup.start_grad_sync` (megatron.core.distributed.param_and_grad_buffer) does much that
must stay upstream's: draining predecessors, NaN checks, gradient_scaling_factor, streams, CUDA-graph events.
Then it calls a collective per bucket, in order:

    distributed optimizer                  `dist_reduce_scatter_func`, a global of that module
      with several instances of it         and `torch.distributed.all_reduce` of the shard, between instances
    replicated optimizer                   `torch.distributed.all_reduce` of the bucket

So the method is overridden on the INSTANCE. For the length of the original call the module's two globals only
write down what they are asked for (intercept.py); after it, the same collectives run in low bits, and where
upstream left a handle it gets ours.

Why not one layer down (torch.distributed itself)? Other users of it would be hit. Why not one layer up (the
whole method)? It differs between releases. Why after the call and not within? Upstream calls within
`_coalescing_manager`, where an all-to-all runs at once while an all-gather waits for the manager's end.

The first batch is dispatched in `finish_grad_sync`, later ones from backward hooks: both go through here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from megatron_patch.collectives.all_reduce import SenderAndOwner
from megatron_patch.collectives.lost_ranks import naming_lost_ranks
from megatron_patch.collectives.topology import NoTwoHops, TwoHops, ranks_per_node, two_hops
from megatron_patch.collectives.two_hop_reduce_scatter import TwoHopSender
from megatron_patch.compensation.sender import Sender
from megatron_patch.integration.chunk import ChunkState
from megatron_patch.integration.seams.intercept import CollectiveCalls, intercepted
from megatron_patch.integration.seams.stock_traffic import stock_gradients

_WHAT = "gradient exchange"
_REPLAYING = (RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT)


class _Handle(Protocol):
    def wait(self) -> Any: ...


class _AllHandles:
    """Stands where upstream keeps a bucket group's one handle (`grad_reduce_handle`)."""

    def __init__(
        self,
        handles: Sequence[_Handle],
        groups: Sequence[dist.ProcessGroup | None],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._handles = handles
        self._groups = groups
        self._stream = stream

    def wait(self) -> None:
        with naming_lost_ranks(_WHAT, *self._groups):
            if self._stream is None:
                for handle in self._handles:
                    handle.wait()
                return
            with torch.cuda.stream(self._stream):
                for handle in self._handles:
                    handle.wait()
            torch.cuda.current_stream().wait_stream(self._stream)


class BucketGroupSeam:
    """Overrides `start_grad_sync` of one bucket group until `detach`.

    `group` is Megatron's `_ParamAndGradBucketGroup`. `reduce_scatter` and `all_reduce` hold the state of its
    two possible collectives, one entry per bucket; either is empty where the group has no such collective,
    or has it within a single rank.

    Args:
        bucket_group: Megatron's bucket group.
        compressor: the chunk's state, in which the senders are allocated.
        expert: whether the parameters are experts', reduced over the expert-data-parallel group.
    """

    def __init__(self, bucket_group: Any, compressor: ChunkState, expert: bool = False) -> None:
        self.group = bucket_group
        self.expert = expert
        self._compressor = compressor
        config = bucket_group.ddp_config
        self.scatter_group: dist.ProcessGroup | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        if not config.use_distributed_optimizer:
            self.reduce_group = bucket_group.data_parallel_group
        else:
            self.scatter_group = bucket_group.intra_distributed_optimizer_instance_group
            if config.num_distributed_optimizer_instances > 1:
                self.reduce_group = bucket_group.inter_distributed_optimizer_instance_group

        shards = self.scatter_group.size() if self.scatter_group is not None else 1
        sizes = [bucket.grad_data.numel() for bucket in bucket_group.buckets]
        self.reduce_scatter: list[Sender | TwoHopSender] = []
        self.all_reduce: list[SenderAndOwner] = []
        self.hops: TwoHops | None = None
        self.flat_because: str | None = None
        """Why the reduce-scatter goes without two hops, where that may not be what was meant."""
        self.momentum: list[torch.Tensor] | None = None
        """1-bit Adam's m of each bucket, fp32 [B], whole on every rank; None before it begins."""
        self.mean_factor = 1.0
        """What an unreduced gradient is multiplied by to be its rank's own, of which the mean is wanted."""
        if compressor.config.momentum:
            everyone = self.momentum_group
            if everyone.size() > 1:
                self.hops = self._hops(everyone)
                self.all_reduce = [compressor.add_all_reduce(size, everyone, self.hops) for size in sizes]
        elif compressor.config.compresses:
            if (ranks := self.scatter_group) is not None and ranks.size() > 1:
                self.hops = self._hops(ranks)
                for size in sizes:
                    if self.hops is None:
                        self.reduce_scatter.append(compressor.add_reduce_scatter(size, ranks))
                    else:
                        self.reduce_scatter.append(compressor.add_two_hops(size, self.hops))
            if (ranks := self.reduce_group) is not None and ranks.size() > 1:
                hops = None  # between instances of the distributed optimizer one hop
                if self.scatter_group is None:
                    hops = self.hops = self._hops(ranks)
                self.all_reduce = [compressor.add_all_reduce(n // shards, ranks, hops) for n in sizes]

        self._step_of_last_exchange = -1
        self._original = bucket_group.start_grad_sync

        @functools.wraps(self._original)
        def start_grad_sync(force_all_reduce: bool | None = False) -> None:
            self._start_grad_sync(force_all_reduce)

        bucket_group.start_grad_sync = start_grad_sync

    def _hops(self, group: dist.ProcessGroup) -> TwoHops | None:
        config = self._compressor.config
        if config.topology == "flat":
            return None
        try:
            return two_hops(group, ranks_per_node(config.ranks_per_node))
        except NoTwoHops as reason:
            if reason.irregular or config.topology == "two_hop":
                self.flat_because = str(reason)
            return None

    @property
    def exchanges_momentum(self) -> bool:
        """Whether the method is 1-bit Adam."""
        return self._compressor.config.momentum

    @property
    def momentum_group(self) -> dist.ProcessGroup:
        """The data-parallel ranks of this bucket group, over which 1-bit Adam exchanges momentum."""
        group = self.scatter_group or self.reduce_group
        assert group is not None
        return group

    def momentum_views(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Every parameter with its part of `momentum`, which is allocated where it is not there yet."""
        buckets = self.group.buckets
        if self.momentum is None:
            self.momentum = [torch.zeros_like(bucket.grad_data, dtype=torch.float32) for bucket in buckets]
        for bucket, held in zip(buckets, self.momentum, strict=True):
            for parameter, (start, end) in bucket.param_to_index.items():
                yield parameter, held[start:end].view(parameter.main_grad.shape)

    def gather_momentum(self) -> None:
        """Where Adam's state is sharded: fetch the other ranks' shards of `momentum`."""
        if self.scatter_group is None or self.scatter_group.size() == 1:
            return
        for held in self.momentum or ():
            own = held.view(self.scatter_group.size(), -1)[self.scatter_group.rank()].clone()
            dist.all_gather_into_tensor(held, own, group=self.scatter_group)

    @property
    def compresses(self) -> bool:
        """Whether any of this group's gradients leave in low bits (not with method none)."""
        return bool(self.reduce_scatter or self.all_reduce)

    def collectives(self) -> Iterator[tuple[str, int, list[int]]]:
        """(what and over which group, its ranks, elements of each bucket) of the gradients' collectives."""
        name = "expert data parallel" if self.expert else "data parallel"
        sizes = [bucket.grad_data.numel() for bucket in self.group.buckets]
        how = f" in two hops, {self.hops.nodes} nodes of {self.hops.local} ranks:" if self.hops else ""
        if self.exchanges_momentum:
            yield f"{name} all-reduce of momentum{how}", self.momentum_group.size(), sizes
            return
        if self.scatter_group is not None:
            yield f"{name} reduce-scatter{how}", self.scatter_group.size(), sizes
            sizes = [size // self.scatter_group.size() for size in sizes]
        if self.reduce_group is not None:
            where = how if self.scatter_group is None else " between optimizer instances"
            yield f"{name} all-reduce{where}", self.reduce_group.size(), sizes

    @property
    def exchanged(self) -> bool:
        """Whether this step's exchange has taken place, though the optimizer has not stepped yet."""
        return self._step_of_last_exchange == self._compressor.steps_seen

    def detach(self) -> None:
        """Give the bucket group its own method back."""
        del self.group.start_grad_sync

    def _start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        group = self.group
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # upstream's own early return: this batch was dispatched already
        if self.exchanges_momentum and self._compressor.active:
            self._leave_unreduced(force_all_reduce)
            return
        self._notice_repetition()
        if not self.compresses or force_all_reduce or not self._compressor.active:
            self._compressor.count(stock_gradients(group, bool(force_all_reduce)))
            if self.compresses:
                self._compressor.events.uncompressed_syncs += 1
            self._original(force_all_reduce=force_all_reduce)
            return

        with intercepted() as asked:
            self._original(force_all_reduce=force_all_reduce)
        self._check(asked)
        stream = self._stream()
        groups = self.scatter_group, self.reduce_group
        with (
            naming_lost_ranks(_WHAT, *groups),
            nullcontext() if stream is None else torch.cuda.stream(stream),
        ):
            handles = self._start(asked)
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle = _AllHandles(handles, groups, stream)
            else:
                _AllHandles(handles, groups).wait()

    def _leave_unreduced(self, force_all_reduce: bool | None) -> None:
        """1-bit Adam after its warm-up: the optimizer's step will exchange momentum (onebit_adam/step.py)."""
        if force_all_reduce:
            raise RuntimeError("megatron-loco: onebit_adam reduces no gradients after its warm-up")
        with intercepted() as asked:
            self._original(force_all_reduce=force_all_reduce)
        self._check(asked)
        self.mean_factor = 1.0 if asked.average else float(self.momentum_group.size())
        if self.group.grad_reduce_handle is not None:
            self.group.grad_reduce_handle = _AllHandles([], [])

    def _start(self, asked: CollectiveCalls) -> Sequence[_Handle]:
        """Run what was asked for; the last collective of each bucket may still be under way."""
        run, average = self._compressor, asked.average
        handles: list[_Handle] = []
        if (ranks := self.scatter_group) is not None:
            handles += [
                run.reduce_scatter(sender, gradient, output, ranks, average)
                for sender, (output, gradient) in zip(self.reduce_scatter, asked.reduce_scatter, strict=False)
            ]
        if (ranks := self.reduce_group) is not None:
            for handle in handles:
                handle.wait()  # an instance's sum, which the all-reduce between instances needs
            handles = [
                run.all_reduce(parts, tensor, ranks, average)
                for parts, tensor in zip(self.all_reduce, asked.all_reduce, strict=False)
            ]
        return handles

    def _stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream on which this group's exchange runs, where it is not the current one.

        With overlap it is one of its own: what is compressed, and what is waited for so that few buckets are
        in flight, must not hold up the backward pass.
        """
        config, stream = self.group.ddp_config, self._compressor.stream
        if not config.overlap_grad_reduce or stream is None:
            return None
        if config.num_distributed_optimizer_instances > 1:
            upstreams: torch.cuda.Stream = self.group.communication_stream  # which has waited already
            return upstreams
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def _check(self, asked: CollectiveCalls) -> None:
        buckets = len(self.group.buckets)
        expected = (buckets if self.scatter_group else 0, buckets if self.reduce_group else 0)
        found = (len(asked.reduce_scatter), len(asked.all_reduce))
        if found != expected:
            raise RuntimeError(
                "megatron-loco: start_grad_sync of megatron.core.distributed.param_and_grad_buffer asked for "
                f"{found[0]} reduce-scatters and {found[1]} all-reduces through the module's globals, not "
                f"{expected[0]} and {expected[1]}: this release of megatron-core is not supported"
            )

    def _notice_repetition(self) -> None:
        """Tell the compressor of a backward pass that runs again within one optimizer step."""
        compressor = self._compressor
        if self.exchanged:
            if get_rerun_state_machine().state in _REPLAYING:
                compressor.replayed()
            else:
                compressor.exchanged_twice()
        self._step_of_last_exchange = compressor.steps_seen
