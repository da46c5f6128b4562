"""1-bit Adam's momentum m of one bucket group: whole on every rank, fp32, in the order of the gradient
buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


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
