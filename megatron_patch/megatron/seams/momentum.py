"""1-bit Adam's momentum m of one bucket group: whole on every rank, fp32, in the gradient buffers' order.

Tensor-parallel ranks hold copies of norms, biases and routers, the first and last pipeline stage one each of
tied embeddings. finalize_model_grads gave all copies the same gradient, but momentum is rounded after it, in
blocks shared with other neighbours on every rank. The copies' mean loses nothing: each sender's error
remembers what was lost of its own (`Replicas`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class Replicas:
    """Parts of momentum buffers that all ranks of a group hold copies of.

    Args:
        views: the parts, in the same order on all ranks of the group.
        group: the ranks.
    """

    def __init__(self, views: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._views = list(views)
        self._group = group

    def average(self) -> None:
        """Make the copies equal: their mean, summed in fp32 by one all-reduce."""
        flat = torch.cat([view.reshape(-1) for view in self._views])
        dist.all_reduce(flat, group=self._group)
        flat /= self._group.size()
        sizes = [view.numel() for view in self._views]
        for view, mean in zip(self._views, flat.split(sizes), strict=True):
            view.copy_(mean.view_as(view))


def find_replicas(chunks: Sequence[Any], views: dict[Any, torch.Tensor]) -> Iterator[Replicas]:
    """What of the chunks' momentum are copies; `views` has each parameter's part."""
    # The only one of these groups that DDP does not know itself.
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
    # The word embeddings last: a stage may hold them beside other copies.
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
    """m of each bucket of a Megatron bucket group.

    Args:
        bucket_group: Megatron's bucket group.
        group: its data-parallel ranks, over which momentum is exchanged.
        sharded_over: the ranks that Adam's state is sharded over; None where every rank holds all of it.
    """

    def __init__(
        self, bucket_group: Any, group: dist.ProcessGroup, sharded_over: dist.ProcessGroup | None
    ) -> None:
        self._bucket_group = bucket_group
        self.group = group
        self._sharded_over = sharded_over
        self.held: list[torch.Tensor] | None = None
        """fp32 [B] for each bucket; None before momentum is exchanged."""
        self.mean_factor = 1.0
        """Megatron has scaled the unreduced gradients for its own collective. Times this factor, a rank's are
        those whose mean over the ranks is the gradient of the step."""

    def views(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Every parameter with its part of m, which is allocated where it is not there yet."""
        buckets = self._bucket_group.buckets
        if self.held is None:
            self.held = [torch.zeros_like(bucket.grad_data, dtype=torch.float32) for bucket in buckets]
        for bucket, held in zip(buckets, self.held, strict=True):
            for parameter, (start, end) in bucket.param_to_index.items():
                yield parameter, held[start:end].view(parameter.main_grad.shape)

    def gather(self) -> None:
        """Where Adam's state is sharded: fetch the other ranks' shards of m."""
        ranks = self._sharded_over
        if ranks is None or ranks.size() == 1:
            return
        for held in self.held or ():
            own = held.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(held, own, group=ranks)

    def reduce_gradients(self) -> None:
        """Reduce the gradients that were left unreduced, in full, for an optimizer step of Megatron's own."""
        for bucket in self._bucket_group.buckets:
            bucket.grad_data.mul_(self.mean_factor / self.group.size())
            dist.all_reduce(bucket.grad_data, group=self.group)

    def clear_padding(self) -> None:
        """Zero m between and behind a bucket's parameters.

        A 1-bit code leaves something there, which weighs in the next scales, but no checkpoint has it.
        """
        for bucket, held in zip(self._bucket_group.buckets, self.held or (), strict=True):
            last = 0
            for start, end in sorted(bucket.param_to_index.values()):
                held[last:start].zero_()
                last = end
            held[last:].zero_()
