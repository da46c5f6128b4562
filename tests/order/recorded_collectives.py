"""torch.distributed's collectives, written down instead of run, in the order that NCCL's backend gives them.

With `async_op` a collective runs on its communicator's own stream, which waits for the current one; `wait` of
its work has the then current stream wait for it, and lets its tensors go. Without, it runs on the current
stream (since torch 2.8), or on the communicator's, and the current one waits (before). Nothing is moved but
for this rank's own numbers, as if all ranks had the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from order.gpu import GPU, _tensors
from order.machine import Queue
from order.ranks import Collective
from torch.utils._python_dispatch import _disable_current_modes


class Work:
    """What a collective that is under way leaves."""

    def __init__(self, gpu: GPU, queue: Queue, tensors: list[torch.Tensor], what: str = "") -> None:
        self._gpu = gpu
        self.what = what
        self.waited = False
        self._end = gpu.machine.record(queue)
        self._tensors = tensors

    def wait(self, *_: Any) -> bool:
        self._gpu.machine.wait(self._gpu.current.queue, self._end)
        self._tensors.clear()  # which it kept for the allocator's sake
        self.waited = True
        return True


class Recorder:
    """The collectives of one rank.

    Args:
        gpu: its GPU.
        of_their_own: whether collectives that are waited for run on the communicator's stream, too.
    """

    def __init__(self, gpu: GPU, of_their_own: bool = False) -> None:
        self._gpu = gpu
        self._of_their_own = of_their_own
        self._queues: dict[str, Queue] = {}
        self._together: list[tuple[str, list[torch.Tensor], list[torch.Tensor], int]] | None = None
        self.called: list[Collective] = []
        self._under_way: list[Work] = []
        self._older: list[Work] = []

    def end_step(self) -> None:
        """What was begun in the step before must have been waited for."""
        self._gpu.machine.found += [
            f"nothing has waited for the {work.what}" for work in self._older if not work.waited
        ]
        self._older, self._under_way = self._under_way, []

    def run(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        async_op: bool,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        nbytes: int,
    ) -> Work | None:
        """One collective; within `together`, a part of one."""
        if self._together is not None:
            self._together.append((operation, reads, writes, nbytes))
            return None
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        if len(ranks) == 1 or not any(map(self._gpu.machine.holds, (*reads, *writes))):
            return Work(self._gpu, self._gpu.current.queue, []) if async_op else None
        name = f"{(group or dist.group.WORLD).group_name} {ranks}"
        machine, current = self._gpu.machine, self._gpu.current.queue
        queue = current
        if async_op or self._of_their_own:
            if name not in self._queues:
                self._queues[name] = machine.queue(f"NCCL's stream of {ranks}")
            queue = self._queues[name]
            machine.wait(queue, machine.record(current))
        knows = machine.launch(queue, operation, reads=reads, writes=writes).copy()
        self.called.append(Collective(name, ranks, operation, nbytes, queue.number, queue.launched, knows))
        work = Work(self._gpu, queue, [*reads, *writes], f"{operation} of {nbytes} bytes over {ranks}")
        if async_op:
            self._under_way.append(work)
            return work
        work.wait()
        return None

    @contextlib.contextmanager
    def together(self, group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[Any]:
        """torch.distributed's _coalescing_manager."""
        manager = _Together()
        self._together = []
        yield manager
        parts, self._together = self._together, None
        if parts:
            name = " and ".join(dict.fromkeys(part[0] for part in parts))
            reads = [tensor for part in parts for tensor in part[1]]
            writes = [tensor for part in parts for tensor in part[2]]
            work = self.run(name, group, async_ops, reads, writes, sum(part[3] for part in parts))
            if work is not None:
                manager.works.append(work)


class _Together:
    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def _as_if_alike(output: torch.Tensor, source: torch.Tensor, count: int) -> None:
    with _disable_current_modes(), torch.no_grad():
        if output.numel() == count * source.numel():
            output.view(-1).view(count, -1).copy_(source.clone().view(1, -1))


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Within the block torch.distributed's collectives are the recorder's."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def all_to_all_single(
        output: Any,
        input: Any,
        outputs: Any = None,
        inputs: Any = None,
        group: Any = None,
        async_op: Any = False,
    ) -> Any:
        own = (group or dist.group.WORLD).rank()
        if outputs is None:
            count = (group or dist.group.WORLD).size()
            outputs = inputs = [output.numel() // count] * count
        with _disable_current_modes(), torch.no_grad():
            for part, size in zip(output.view(-1).split(list(outputs)), outputs, strict=True):
                mine = input.view(-1)[sum(inputs[:own]) : sum(inputs[: own + 1])]
                if size == mine.numel():
                    part.copy_(mine)
        nbytes = sum(inputs) * input.element_size()
        return recorder.run("all-to-all", group, async_op, [input], [output], nbytes)

    def all_gather_into_tensor(output: Any, input: Any, group: Any = None, async_op: Any = False) -> Any:
        _as_if_alike(output, input, (group or dist.group.WORLD).size())
        return recorder.run("all-gather", group, async_op, [input], [output], output.nbytes)

    def reduce_scatter_tensor(
        output: Any, input: Any, op: Any = None, group: Any = None, async_op: Any = False
    ) -> Any:
        return recorder.run("reduce-scatter", group, async_op, [input], [output], input.nbytes)

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: Any = False) -> Any:
        return recorder.run("all-reduce", group, async_op, [tensor], [tensor], tensor.nbytes)

    def broadcast(tensor: Any, src: Any = 0, group: Any = None, async_op: Any = False, **_: Any) -> Any:
        return recorder.run("broadcast", group, async_op, [tensor], [tensor], tensor.nbytes)

    def unknown(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(map(recorder._gpu.machine.holds, _tensors((*args, *kwargs.values())))):
                raise NotImplementedError(f"{name} on the GPU")

        return call

    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for function in (
            all_to_all_single,
            all_gather_into_tensor,
            reduce_scatter_tensor,
            all_reduce,
            broadcast,
        ):
            put(dist, function.__name__, function)
        for name in (
            "all_gather",
            "all_to_all",
            "reduce",
            "reduce_scatter",
            "gather",
            "scatter",
            "send",
            "recv",
        ):
            put(dist, name, unknown(name))
        put(buffers, "dist_all_gather_func", all_gather_into_tensor)
        put(buffers, "dist_reduce_scatter_func", reduce_scatter_tensor)
        put(buffers, "_coalescing_manager", recorder.together)
        put(dist, "get_backend", lambda *_: "nccl")
        new_group = dist.new_group  # Megatron makes gloo's groups, too, which a store of no ranks cannot
        put(dist, "new_group", lambda *args, **options: new_group(*args, **options | {"backend": "fake"}))
        yield
