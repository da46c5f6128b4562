"""What every tensor-parallel rank holds a copy of stays the same on all of them.

Norms, biases, routers and the like are not split among tensor-parallel ranks. Without sequence parallelism
each rank computes the same gradient for its copy, and stock Megatron needs no exchange to keep the copies
equal. Compression rounds them differently: a block's scale depends on its neighbours in the bucket, which are
other parts of the split weights on every rank. The copies would drift apart, silently.

Megatron's finalize_model_grads averages the gradients of parameters with `average_gradients_across_tp_domain`
over the tensor-parallel group (what it sums under sequence parallelism it sums anyway): those copies get the
mark. They are few and small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_MARK = "average_gradients_across_tp_domain"


def mark(chunk: Any) -> list[torch.nn.Parameter]:
    """Have Megatron average a DDP-wrapped chunk's copies over tensor-parallel ranks; returns those marked."""
    found = list(_copies(chunk)) if chunk.tp_group.size() > 1 else []
    for parameter in found:
        setattr(parameter, _MARK, True)
    return found


def unmark(parameters: list[torch.nn.Parameter]) -> None:
    """Undo `mark`."""
    for parameter in parameters:
        delattr(parameter, _MARK)


def _copies(chunk: Any) -> Iterator[torch.nn.Parameter]:
    config = chunk.config
    for name, parameter in chunk.module.named_parameters():
        # Megatron sums these after the exchange: finalize_model_grads' own conditions.
        summed = (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
            config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        )
        split = getattr(parameter, "tensor_model_parallel", False)
        expert = not getattr(parameter, "allreduce", True)  # of another tensor-parallel group
        marked = hasattr(parameter, _MARK)
        if parameter.requires_grad and not (summed or split or expert or marked):
            yield parameter
