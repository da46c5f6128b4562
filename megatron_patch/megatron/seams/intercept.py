"""Records the collectives for which Megatron asks, instead of running them.

`start_grad_sync` asks for them through two globals of megatron.core.distributed.param_and_grad_buffer,
`dist_reduce_scatter_func` and `torch`, and `start_param_sync` through `dist_all_gather_func`. Within a block
these globals are replaced; calls of other threads still reach the originals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.patching import View


@dataclass
class CollectiveCalls:
    """The recorded collectives, one for each bucket, as (output, input)."""

    reduce_scatter: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    all_reduce: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    average: bool = False

    def of(self, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the collectives of one kind: "reduce-scatter" or "all-reduce"."""
        return {"reduce-scatter": self.reduce_scatter, "all-reduce": self.all_reduce}[kind]


one_thread = threading.RLock()
"""Only one thread replaces globals at a time: a second one would take the first one's for Megatron's."""


def for_this_thread(ours: Callable[..., Any], upstreams: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` in this thread, and `upstreams` in all other threads."""
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else upstreams)(*args, **kwargs)

    return either


@contextmanager
def intercepted() -> Iterator[CollectiveCalls]:
    """Within the block, record Megatron's gradient collectives instead of running them."""
    calls = CollectiveCalls()

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Any = None, **_: Any) -> object:
        calls.reduce_scatter.append((output, input))
        calls.average = op == dist.ReduceOp.AVG
        # With reduce_scatter_with_fp32_accumulation and overlap the result is the handle, and not None.
        return calls

    def all_reduce(tensor: torch.Tensor, op: Any = None, **_: Any) -> None:
        calls.all_reduce.append((tensor, tensor))
        calls.average = op == dist.ReduceOp.AVG

    with one_thread:
        upstream: Any = param_and_grad_buffer.torch
        either = for_this_thread(all_reduce, upstream.distributed.all_reduce)
        view = View(upstream, distributed=View(upstream.distributed, all_reduce=either))
        scatter = for_this_thread(reduce_scatter, param_and_grad_buffer.dist_reduce_scatter_func)
        with patching.swapped({symbols.REDUCE_SCATTER: scatter, symbols.TORCH: view}):
            yield calls


@contextmanager
def intercepted_all_gathers() -> Iterator[list[torch.Tensor]]:
    """Within the block, record the outputs of Megatron's all-gathers of weights instead of running them."""
    outputs: list[torch.Tensor] = []

    def all_gather(output: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
        outputs.append(output)

    with one_thread:
        either = for_this_thread(all_gather, param_and_grad_buffer.dist_all_gather_func)
        with patching.swapped({symbols.ALL_GATHER: either}):
            yield outputs
