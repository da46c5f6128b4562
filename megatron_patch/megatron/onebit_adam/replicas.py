"""Momentum of parameters that several ranks of a model hold copies of: averaged, so that the copies stay one.

Tensor-parallel ranks hold copies of norms, biases and routers, the first and last pipeline stage one each of
tied embeddings. finalize_model_grads gave all copies the same gradient, but momentum is rounded after it, in
blocks shared with other neighbours on every rank. The copies' mean loses nothing: each sender's error
remembers what was lost of its own.
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


def find(chunks: Sequence[Any], views: dict[Any, torch.Tensor]) -> Iterator[Replicas]:
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
