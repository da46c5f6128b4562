"""Keeps parameters that tensor-parallel ranks do not split equal on these ranks.

Norms, biases, routers and the like are not split among tensor-parallel ranks. Without sequence parallelism
each rank computes the same gradient for its copy, and stock Megatron needs no exchange to keep the copies
equal. Compression rounds them differently, because a block's scale depends on neighbours in the bucket that
differ between ranks, and the copies would silently drift apart. Megatron's finalize_model_grads averages the
gradients of parameters that have the attribute `average_gradients_across_tp_domain` over the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_MARK = "average_gradients_across_tp_domain"


def mark(chunk: Any, tensor_group: dist.ProcessGroup) -> list[torch.nn.Parameter]:
    """Mark a chunk's unsplit parameters, so that Megatron averages their gradients; return them."""
    copies = list(_copies(chunk)) if tensor_group.size() > 1 else []
    for parameter in copies:
        setattr(parameter, _MARK, True)
    return copies


def unmark(parameters: list[torch.nn.Parameter]) -> None:
    """Remove the attribute that `mark` has set."""
    for parameter in parameters:
        delattr(parameter, _MARK)


def _copies(chunk: Any) -> Iterator[torch.nn.Parameter]:
    config = chunk.config
    for name, parameter in chunk.module.named_parameters():
        plain = getattr(parameter, "orig_param", parameter)  # Megatron-FSDP's own lack `allreduce`.
        # finalize_model_grads sums the gradients of these parameters after the exchange, by these conditions.
        summed = (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
            config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        )
        split = getattr(parameter, "tensor_model_parallel", False)
        expert = not getattr(plain, "allreduce", True)  # Experts have another tensor-parallel group.
        marked = hasattr(parameter, _MARK)
        if parameter.requires_grad and not (summed or split or expert or marked):
            yield parameter
