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
        self._state = state
        self._outer = outer
        groups = enumerate(pipeline.buffer.parameter_groups)
        self.buffers = {
            n: group.main_grad_buffer for n, group in groups if group.main_grad_buffer is not None
        }
        """The gradients by the numbers of their buckets; none of what is frozen."""
        self.exchanges: dict[int, Exchange] = {}
        """Likewise; none over a single rank, nor with method none."""
        self.flat_because: str | None = None
        for number, buffer in self.buffers.items() if state.config.compresses else ():
            self._make(number, buffer)
        state.exchanges += self.exchanges.values()
        self._original: Callable[..., Any] = pipeline._bucket_group_gradient_reduce
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

    def detach(self) -> None:
        """Restore the pipeline's original method."""
        self._override.undo()
        self.exchanges = {}  # where somebody's override still calls this one

    def _reduce(self, bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
        self._state.exchange_begins(1, rerun=False)
        with self._ours(bucket_group):
            return self._original(bucket_group, *args, **kwargs)

    @contextmanager
    def _ours(self, bucket_group: list[int]) -> Iterator[None]:
        """Within the block the collectives of a group of buckets are counted, and run in low bits."""
        upstream: Any = param_and_grad_buffer.torch
        manager: Any = param_and_grad_buffer._coalescing_manager
        scale: Any = param_and_grad_buffer.gradient_reduce_preprocessing
        low = self._state.active and bucket_group[0] in self.exchanges
        recorded: list[tuple[torch.Tensor, torch.Tensor, bool, dist.ProcessGroup]] = []

        def reduce_scatter_tensor(output: Any, input: Any, op: Any, group: Any) -> None:
            if low and self._outer is None:
                recorded.append((input, output, op == dist.ReduceOp.AVG, group))
                return
            traffic = reduce_scattered(input, group.size())
            if self._outer is None:
                self._state.count(traffic)
            else:
                self._state.count_inside(traffic.nbytes)
            upstream.distributed.reduce_scatter_tensor(output, input, op=op, group=group)

        def all_reduce(tensor: Any, op: Any, group: Any) -> None:
            if low:
                recorded.append((tensor, tensor, op == dist.ReduceOp.AVG, group))
                return
            self._state.count(all_reduced(tensor, group.size()))
            upstream.distributed.all_reduce(tensor, op=op, group=group)

        @contextmanager
        def coalescing(group: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            if not low or (self._outer is not None and group is not self._outer):
                with manager(group, *args, **kwargs) as coalesced:
                    yield coalesced
                return
            yield None
            self._run(bucket_group, recorded)

        def scaled(gradient: torch.Tensor, factor: Any, config: Any) -> Any:
            # It may put the factor into a ReduceOp of NCCL's, from which it cannot be read.
            plain = View(config, gradient_reduce_div_fusion=False)
            return scale(gradient, factor, plain if low and self._outer is None else config)

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
        if recorded:
            raise self._unsupported()

    def _run(self, buckets: list[int], recorded: list[Any]) -> None:
        """Run what was asked for of these buckets, one after the other, to its end."""
        calls = recorded.copy()
        recorded.clear()
        if len(calls) != len(buckets):
            raise self._unsupported()
        handles = [
            self._state.start(self.exchanges[number], *call)
            for number, call in zip(buckets, calls, strict=True)
        ]
        for handle in handles:
            handle.wait()

    @staticmethod
    def _unsupported() -> RuntimeError:
        return RuntimeError(
            "megatron-loco: _bucket_group_gradient_reduce of Megatron-FSDP did not ask for one collective of "
            "each bucket within its _coalescing_manager: this release of megatron-core is not supported"
        )
