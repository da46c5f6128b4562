"""Holds 1-bit Adam's momentum m of a bucket group: all of it on every rank, fp32, as in the gradient buffer.

Tensor-parallel ranks hold copies of norms, biases and routers; the first and the last pipeline stage each
have one of tied embeddings. finalize_model_grads gives all copies the same gradient, but momentum is rounded
later, in blocks whose other elements differ between ranks. So the copies are replaced by their mean
(`Replicas`). This loses nothing, because each sender's error remembers what rounding lost of its own copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class Replicas:
    """Parts of momentum buffers of which every rank of a group holds a copy.

    Args:
        views: the parts, in the same order on all ranks of the group.
        group: the ranks that hold the copies.
    """

    def __init__(self, views: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._views = list(views)
        self._group = group

    def average(self) -> None:
        """Replace the copies by their mean, which one all-reduce sums in fp32."""
        flat = torch.cat([view.reshape(-1) for view in self._views])
        dist.all_reduce(flat, group=self._group)
        flat /= self._group.size()
        sizes = [view.numel() for view in self._views]
        for view, mean in zip(self._views, flat.split(sizes), strict=True):
            view.copy_(mean.view_as(view))


def find_replicas(chunks: Sequence[Any], views: dict[Any, torch.Tensor]) -> Iterator[Replicas]:
    """Yield the copied parts of the chunks' momentum; `views` has the part of each parameter."""
    # This is the only one of these groups that DDP does not have as an attribute.
    expert_group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for chunk in chunks:
        for parameter in chunk.module.parameters():
            if parameter not in views or getattr(parameter, "tensor_model_parallel", False):
                continue
            expert = not getattr(parameter, "allreduce", True)
            group = expert_group if expert else chunk.tp_group
            if group is not None and group.size() > 1:
                by_group.setdefault(group, []).append(views[parameter])
    for group, parts in by_group.items():
        yield Replicas(parts, group)
    # The word embeddings come last, because a stage may hold them beside other copies.
    tied = [
        views[parameter]
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if getattr(parameter, "shared_embedding", False) and parameter in views
    ]
    ends = parallel_state.get_embedding_group(check_initialized=False)
    if tied and ends is not None and ends.size() > 1:
        yield Replicas(tied, ends)


class MomentumBuffers:
    """The momentum m of each bucket of a Megatron bucket group.

    Args:
        bucket_group: the bucket group.
        group: its data-parallel group, over which momentum is exchanged.
        sharded_over: the group over which Adam's state is sharded; None if every rank holds all of it.
    """

    def __init__(
        self, bucket_group: Any, group: dist.ProcessGroup, sharded_over: dist.ProcessGroup | None
    ) -> None:
        self._bucket_group = bucket_group
        self.group = group
        self._sharded_over = sharded_over
        self.held: list[torch.Tensor] | None = None
        """The momentum of each bucket, fp32 [B]; None before momentum is exchanged."""
        self.mean_factor = 1.0
        """Times this factor, the ranks' unreduced gradients have the gradient of the step as their mean.

        Without it they are scaled for Megatron's own collective.
        """

    def views(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield every parameter with its part of m; m is allocated if it does not exist yet."""
        buckets = self._bucket_group.buckets
        if self.held is None:
            self.held = [torch.zeros_like(bucket.grad_data, dtype=torch.float32) for bucket in buckets]
        for bucket, held in zip(buckets, self.held, strict=True):
            for parameter, (start, end) in bucket.param_to_index.items():
                yield parameter, held[start:end].view(parameter.main_grad.shape)

    def buffers(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield every bucket of Megatron with its momentum, if it is held."""
        yield from zip(self._bucket_group.buckets, self.held or (), strict=False)

    def gather(self) -> None:
        """All-gather the shards of m if Adam's state is sharded."""
        ranks = self._sharded_over
        if ranks is None or ranks.size() == 1:
            return
        for held in self.held or ():
            own = held.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(held, own, group=ranks)

    def reduce_gradients(self) -> None:
        """Reduce, uncompressed, the gradients that were left unreduced, for a step of Megatron's own."""
        for bucket in self._bucket_group.buckets:
            bucket.grad_data.mul_(self.mean_factor / self.group.size())
            dist.all_reduce(bucket.grad_data, group=self.group)

    def clear_padding(self) -> None:
        """Set m to zero between and after a bucket's parameters.

        A 1-bit code leaves values there that would change the next scales and that no checkpoint has.
        """
        for bucket, held in zip(self._bucket_group.buckets, self.held or (), strict=True):
            last = 0
            for start, end in sorted(bucket.param_to_index.values()):
                held[last:start].zero_()
                last = end
            held[last:].zero_()
