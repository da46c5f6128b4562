"""Seam: reduces Megatron-FSDP's gradients in low bits.

`GradReducePipeline._bucket_group_gradient_reduce` (megatron.core.distributed.fsdp...param_and_grad_buffer)
is called for each group of buckets in each backward pass. It calls two kinds of collectives, each kind
within a `_coalescing_manager`, and adds up their results right after the manager's end:

    DP-shard   a reduce-scatter of every bucket
    DP-outer   with several optimizer instances (HSDP): an all-reduce of the shard after a step's last
               reduce-scatter

The method is overridden on the INSTANCE. While the original runs, the module's `torch` and
`_coalescing_manager` are replaced by objects that record the collectives and run them in low bits where
Megatron's manager would have ended. Only one kind is compressed: the reduce-scatter, or with several
instances the all-reduce between them, which crosses nodes. The other kind stays Megatron's own.
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
from megatron_patch.megatron.seams.gradients import is_rerun
from megatron_patch.megatron.seams.intercept import for_this_thread, one_thread
from megatron_patch.quantization.blocks import Contents, Span
from megatron_patch.session import torch_steps
from megatron_patch.session.session import Session


def contents_of(buffer: Any) -> Contents:
    """Return where the parameters lie in a bucket of Megatron-FSDP; `buffer` is its DataParallelBuffer.

    The padding between and after the parameters is uninitialized memory and belongs to no block.
    """
    items = sorted(buffer.item_index_map.values(), key=lambda item: item.global_data_index)
    spans = [Span.of(i.global_data_index, tuple(i.shape), exact=len(i.shape) < 2) for i in items if i.size]
    return Contents(buffer.bucket_index.size, tuple(spans))


class GradientReductions:
    """Overrides `_bucket_group_gradient_reduce` of one model's pipeline until `detach`.

    Args:
        pipeline: the GradReducePipeline of Megatron-FSDP.
        session: the model's session, in which the exchanges are allocated.
        outer: the group of ranks that hold the same shards in the optimizer instances; None if there is one.
    """

    def __init__(self, pipeline: Any, session: Session, outer: dist.ProcessGroup | None) -> None:
        self._session = session
        self._outer = outer
        groups = enumerate(pipeline.buffer.parameter_groups)
        self.buffers = {
            n: group.main_grad_buffer for n, group in groups if group.main_grad_buffer is not None
        }
        """The gradient buffers by the numbers of their buckets; frozen parameters have none."""
        self.exchanges: dict[int, Exchange] = {}
        """The exchanges by the numbers of their buckets; empty over a single rank and with method none."""
        self.flat_because: str | None = None
        for number, buffer in self.buffers.items() if session.config.compresses else ():
            self._make(number, buffer)
        session.exchanges += self.exchanges.values()
        self._original: Callable[..., Any] = pipeline._bucket_group_gradient_reduce
        self._override = patching.override(pipeline, "_bucket_group_gradient_reduce", self._reduce)

    def _make(self, number: int, buffer: Any) -> None:
        contents, shards = contents_of(buffer), buffer.data_parallel_group
        if self._outer is None:
            reduction = make_reduce_scatters([contents], shards, self._session.setup)
        else:
            size = contents.numel // shards.size()
            part = contents.part(shards.rank() * size, size)
            reduction = make_all_reduces([part], self._outer, self._session.setup)
        for exchange in reduction.exchanges:  # There is at most one.
            self.exchanges[number] = exchange
        self.flat_because = self.flat_because or reduction.flat_because

    def detach(self) -> None:
        self._override.undo()
        self.exchanges = {}  # Another override may still call this one.

    def _reduce(self, bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
        self._session.pass_begins(bucket_group[0], is_rerun(), torch_steps.loss_scale())
        with self._ours(bucket_group):
            return self._original(bucket_group, *args, **kwargs)

    @contextmanager
    def _ours(self, bucket_group: list[int]) -> Iterator[None]:
        """Within the block, count the collectives of a group of buckets, and run the compressed kind."""
        upstream: Any = param_and_grad_buffer.torch
        manager: Any = param_and_grad_buffer._coalescing_manager
        scale: Any = param_and_grad_buffer.gradient_reduce_preprocessing
        low = self._session.active and bucket_group[0] in self.exchanges
        low = low and self._session.carries(self.buffers[number].dtype for number in bucket_group)
        recorded: list[tuple[torch.Tensor, torch.Tensor, bool, dist.ProcessGroup]] = []

        def reduce_scatter_tensor(output: Any, input: Any, op: Any, group: Any) -> None:
            if low and self._outer is None:
                recorded.append((input, output, op == dist.ReduceOp.AVG, group))
                return
            traffic = reduce_scattered(input, group)
            if self._outer is None:
                self._session.count(traffic)
            else:
                self._session.count_inside(traffic.nbytes)
            upstream.distributed.reduce_scatter_tensor(output, input, op=op, group=group)

        def all_reduce(tensor: Any, op: Any, group: Any) -> None:
            if low:
                recorded.append((tensor, tensor, op == dist.ReduceOp.AVG, group))
                return
            self._session.count(all_reduced(tensor, group))
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
            # The original may put the factor into a ReduceOp of NCCL, from which it cannot be read.
            plain = View(config, gradient_reduce_div_fusion=False)
            return scale(gradient, factor, plain if low and self._outer is None else config)

        ours: dict[str, Callable[..., Any]] = {
            "reduce_scatter_tensor": reduce_scatter_tensor,
            "all_reduce": all_reduce,
        }
        patched = {name: for_this_thread(f, getattr(upstream.distributed, name)) for name, f in ours.items()}
        values = {
            symbols.FSDP_TORCH: View(upstream, distributed=View(upstream.distributed, **patched)),
            symbols.FSDP_COALESCING: for_this_thread(coalescing, manager),
            symbols.FSDP_SCALING: for_this_thread(scaled, scale),
        }
        with one_thread, patching.swapped(values):
            yield
        if recorded:
            raise self._unsupported()

    def _run(self, buckets: list[int], recorded: list[Any]) -> None:
        calls = recorded.copy()
        recorded.clear()
        if len(calls) != len(buckets):
            raise self._unsupported()
        handles = [
            self._session.start(self.exchanges[number], *call)
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
