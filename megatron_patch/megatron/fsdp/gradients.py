"""Seam: reduces Megatron-FSDP's gradients in low bits.

`GradReducePipeline._bucket_group_gradient_reduce` (megatron.core.distributed.fsdp...param_and_grad_buffer)
is called for each group of buckets in each backward pass. It asks for two kinds of collectives, each kind
within a `_coalescing_manager`, and adds up what they give right after the manager's end:

    DP-shard   a reduce-scatter of every bucket
    DP-outer   with several optimizer instances (HSDP), after a step's last one: an all-reduce of the shard

So the method is overridden on the INSTANCE. For the length of the original call the module's `torch` and
`_coalescing_manager` are ours: they record what is asked for, and run it in low bits where upstream's
manager would have ended. One kind goes in low bits, the other stays Megatron's own: without instances the
reduce-scatter, with them the all-reduce between instances, which is between nodes.

`gradient_reduce_preprocessing` is replaced so that it scales gradients itself: it may put the factor into a
`ReduceOp` of NCCL's, from which it cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

from megatron_patch.collectives.exchange import Exchange, all_reduced, reduce_scattered
from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.patching import View
from megatron_patch.megatron.seams.intercept import for_this_thread, one_thread
from megatron_patch.quantization.blocks import Contents, Span
from megatron_patch.session.session import Session


def contents_of(buffer: Any) -> Contents:
    """What a bucket of Megatron-FSDP is made of: its parameters, with padding between and behind them.

    Padding is memory that nobody has written: it is in no block. `buffer` is a DataParallelBuffer.
    """
    items = sorted(buffer.item_index_map.values(), key=lambda item: item.global_data_index)
    spans = [Span.of(i.global_data_index, tuple(i.shape), exact=len(i.shape) < 2) for i in items if i.size]
    return Contents(buffer.bucket_index.size, tuple(spans))


class GradientReductions:
    """Overrides `_bucket_group_gradient_reduce` of one model's pipeline until `detach`.

    Args:
        pipeline: Megatron-FSDP's GradReducePipeline.
        state: the model's, in which the exchanges are allocated.
        outer: the ranks that hold the same shards, in other optimizer instances; None: there are none.
    """

    def __init__(self, pipeline: Any, state: Session, outer: dist.ProcessGroup | None) -> None:
        self._pipeline = pipeline
        self._state = state
        self._outer = outer
        self.exchanges: dict[int, Exchange] = {}
        """By the number of the bucket; none over a single rank, nor with method none."""
        self.flat_because: str | None = None
        for number, group in enumerate(pipeline.buffer.parameter_groups):
            if group.main_grad_buffer is not None and state.config.compresses:
                self._make(number, group.main_grad_buffer)
        state.exchanges += self.exchanges.values()
        self._original: Callable[..., Any] = pipeline._bucket_group_gradient_reduce
        self._detached = False
        self._override = patching.override(pipeline, "_bucket_group_gradient_reduce", self._reduce)

    def _make(self, number: int, buffer: Any) -> None:
        contents, shards = contents_of(buffer), buffer.data_parallel_group
        if self._outer is None:
            made = make_reduce_scatters([contents], shards, self._state.setup)
        else:
            size = contents.numel // shards.size()
            part = contents.part(shards.rank() * size, size)
            made = make_all_reduces([part], self._outer, self._state.setup)
        for exchange in made.exchanges:  # one at most
            self.exchanges[number] = exchange
        self.flat_because = self.flat_because or made.flat_because

    @property
    def buffers(self) -> dict[int, Any]:
        """The gradient buffers by the numbers of their buckets; none of what is frozen."""
        groups = enumerate(self._pipeline.buffer.parameter_groups)
        return {n: group.main_grad_buffer for n, group in groups if group.main_grad_buffer is not None}

    def detach(self) -> None:
        """Restore the pipeline's original method."""
        self._detached = True
        self._override.undo()

    def _reduce(self, bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
        if self._detached:  # somebody's override still calls this one
            return self._original(bucket_group, *args, **kwargs)
        self._state.exchange_begins(1, rerun=False)
        with self._ours(bucket_group):
            return self._original(bucket_group, *args, **kwargs)

    @contextmanager
    def _ours(self, bucket_group: list[int]) -> Iterator[None]:
        """Within the block the collectives of a group of buckets are counted, and run in low bits."""
        upstream: Any = param_and_grad_buffer.torch
        manager, scale = (
            getattr(param_and_grad_buffer, name)
            for name in ("_coalescing_manager", "gradient_reduce_preprocessing")
        )
        low = self._state.active and bool(self.exchanges)
        inner = _Calls(self, bucket_group, low and self._outer is None, self._count_inner)
        outer = _Calls(self, bucket_group, low and self._outer is not None, self._count_outer)

        def reduce_scatter_tensor(output: Any, input: Any, op: Any, group: Any) -> Any:
            if not inner.take(output, input, op, group):
                return upstream.distributed.reduce_scatter_tensor(output, input, op=op, group=group)
            return None

        def all_reduce(tensor: Any, op: Any, group: Any) -> Any:
            if not outer.take(tensor, tensor, op, group):
                return upstream.distributed.all_reduce(tensor, op=op, group=group)
            return None

        @contextmanager
        def coalescing(group: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            calls = outer if group is self._outer else inner
            if not calls.low:
                with manager(group, *args, **kwargs) as coalesced:
                    yield coalesced
                return
            yield None
            calls.run()

        def scaled(gradient: torch.Tensor, factor: Any, config: Any) -> Any:
            plain = View(config, gradient_reduce_div_fusion=False) if inner.low else config
            return scale(gradient, factor, plain)

        ours: dict[str, Callable[..., Any]] = {
            "reduce_scatter_tensor": reduce_scatter_tensor,
            "all_reduce": all_reduce,
        }
        each = {name: for_this_thread(f, getattr(upstream.distributed, name)) for name, f in ours.items()}
        values = {
            symbols.FSDP_TORCH: View(upstream, distributed=View(upstream.distributed, **each)),
            symbols.FSDP_COALESCING: for_this_thread(coalescing, manager),
            symbols.FSDP_SCALING: for_this_thread(scaled, scale),
        }
        with one_thread, patching.swapped(values):
            yield
        inner.check()

    def _count_inner(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        traffic = reduce_scattered(tensor, group.size())
        if self._outer is None:
            self._state.count(traffic)
        else:
            self._state.count_inside(traffic.nbytes)

    def _count_outer(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._state.count(all_reduced(tensor, group.size()))

    def start(self, number: int, tensor: Any, output: Any, average: bool, group: Any) -> Any:
        """Start the exchange of a bucket; returns its handle."""
        return self._state.start(self.exchanges[number], tensor, output, average, group)


class _Calls:
    """The collectives of one kind that one call of upstream's asks for, a bucket after the other."""

    def __init__(
        self, reductions: GradientReductions, buckets: list[int], low: bool, count: Callable[..., None]
    ) -> None:
        self.low = low and any(number in reductions.exchanges for number in buckets)
        """Whether they are recorded, and run in low bits."""
        self._reductions = reductions
        self._buckets = buckets
        self._count = count
        self._recorded: list[tuple[torch.Tensor, torch.Tensor, bool, dist.ProcessGroup]] = []

    def take(self, output: torch.Tensor, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> bool:
        """Record a collective; returns whether it was, else it is Megatron's own."""
        if self.low:
            self._recorded.append((output, tensor, op == dist.ReduceOp.AVG, group))
        else:
            self._count(tensor, group)
        return self.low

    def run(self) -> None:
        """Run what was recorded, to its end."""
        if len(self._recorded) != len(self._buckets):
            raise RuntimeError(
                "megatron-loco: _bucket_group_gradient_reduce of Megatron-FSDP asked for "
                f"{len(self._recorded)} collectives of {len(self._buckets)} buckets: this release of "
                "megatron-core is not supported"
            )
        calls, self._recorded = self._recorded, []
        handles = [
            self._reductions.start(number, tensor, output, average, group)
            for number, (output, tensor, average, group) in zip(self._buckets, calls, strict=True)
        ]
        for handle in handles:
            handle.wait()

    def check(self) -> None:
        """See that all that was recorded has run."""
        if self._recorded:
            raise RuntimeError(
                "megatron-loco: Megatron-FSDP reduced gradients outside its _coalescing_manager: this "
                "release of megatron-core is not supported"
            )
