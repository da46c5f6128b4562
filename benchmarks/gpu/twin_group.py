"""A data-parallel group of N ranks of which only this one exists, for a real rank's step on one GPU.

The others are taken to hold what this rank holds: gradients sum to N times its own, and the messages that it
receives are its own. So every collective moves real bytes in this GPU's memory, numbers stay finite, and the
kernels do a real rank's work; other ranks' weights stand still. As with NCCL, collectives run on a stream of
their own, which waits for the caller's. `Wire` adds the time of a link, spent by a kernel of one warp: NCCL's
own kernels take a few multiprocessors, this one takes none to speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.kernels import twin_wire_kernel
from benchmarks.gpu.part import ON_GPU
from megatron_patch.weights.gather import WeightGather

Tensors = Sequence[torch.Tensor]


class Wire:
    """The simulated link of a rank, and what went over it."""

    bytes_per_second: float | None = None
    """Each way; None: transfers take no time."""
    latency = 20e-6
    sent = 0.0
    _stream: Any = None
    _sink: Any = None

    @classmethod
    def stream(cls) -> Any:
        if cls._stream is None:
            cls._stream = torch.cuda.Stream()
            cls._sink = torch.zeros(1, dtype=torch.int64, device="cuda")
        return cls._stream

    @classmethod
    def take(cls, nbytes: float) -> None:
        """Keep the current stream busy for as long as a transfer takes."""
        cls.sent += nbytes
        if cls.bytes_per_second is not None and ON_GPU:
            cls.spin(cls.latency + nbytes / cls.bytes_per_second)

    @classmethod
    def spin(cls, seconds: float) -> None:
        twin_wire_kernel[(1,)](int(seconds * 1e9), cls._sink, num_warps=1)

    @classmethod
    def seconds_of_5_ms(cls) -> float:
        """Measure what the GPU's clock makes of 5 ms."""
        cls.stream()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cls.spin(5e-3)
        start.record()
        cls.spin(5e-3)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class _Work(dist._Work):
    def __init__(self, event: Any = None) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True


_ProcessGroup: Any = dist.ProcessGroup  # Releases of torch annotate its methods in different ways.


class TwinGroup(_ProcessGroup):
    """N ranks with the same numbers, of which this is one. The methods are those that torch calls."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return "twin"

    def _run(self, tensors: Tensors, nbytes: float, work: Callable[[], object]) -> _Work:
        """Do `work` on the wire's stream, after what the current stream has; this rank sends `nbytes`."""
        if not any(tensor.is_cuda for tensor in tensors):
            with torch.no_grad():
                work()
            Wire.take(nbytes)
            return _Work()
        stream = Wire.stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
            Wire.take(nbytes)
            event = torch.cuda.Event()
            event.record()
        for tensor in tensors:
            tensor.record_stream(stream)
        return _Work(event)

    def _to_others(self, tensors: Tensors) -> float:
        """What a rank sends of tensors that are scattered or gathered."""
        return sum(tensor.nbytes for tensor in tensors) * (self._size - 1) / self._size

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Work:
        def work() -> None:
            if getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                for tensor in tensors:
                    tensor.mul_(self._size)

        return self._run(tensors, 2 * self._to_others(tensors), work)

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> _Work:
        return _Work()

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        slots = [slot for one in outputs for slot in one]

        def work() -> None:
            for some, own in zip(outputs, inputs, strict=True):
                for slot in some:
                    slot.copy_(own)

        return self._run([*slots, *inputs], self._to_others(slots), work)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        def work() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                rows = output.view(self._size, -1)
                if output.dtype in (torch.bfloat16, torch.float16):  # Weights: the others' stand still.
                    rows.mul_(1)
                    if rows[self._rank].data_ptr() != own.data_ptr():
                        rows[self._rank].copy_(own.reshape(-1))
                else:
                    rows.copy_(own.reshape(1, -1).clone())

        return self._run([*outputs, *inputs], self._to_others(outputs), work)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> _Work:
        return self.allgather_into_tensor_coalesced([output], [own], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        factor = 1 if getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.AVG else self._size

        def work() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                torch.mul(whole.reshape(self._size, -1)[self._rank], factor, out=output.view(-1))

        return self._run([*outputs, *inputs], self._to_others(inputs), work)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def alltoall_base(
        self, output: torch.Tensor, whole: torch.Tensor, received: Any, sent: Any, opts: Any = None
    ) -> _Work:
        sizes = list(sent) or [whole.shape[0] // self._size] * self._size
        own = whole.split(sizes)[self._rank]

        def work() -> None:
            output.view(self._size, -1).copy_(own.reshape(1, -1))

        return self._run([output, whole], whole.nbytes - own.nbytes, work)

    # As newer releases of torch call them.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def initialize(size: int) -> None:
    """Make the default group one of `size` ranks of which this is rank 0."""

    def create(store: Any, rank: int, ranks: int, timeout: Any) -> TwinGroup:
        return TwinGroup(rank, ranks)

    dist.Backend.register_backend("twin", create, devices=["cpu", "cuda"])
    dist.init_process_group("twin", rank=0, world_size=size, store=dist.HashStore())


class TwinsRead:
    """Has the exact gather decode what the others sent, copies of the own message, into copies of the own old
    shard: a real rank's work, and the copies. `checks` compares every decoded shard with the own new one."""

    def __init__(self) -> None:
        self.checks = True
        self.decoded = self.wrong = 0

        def read(gather: Any, messages: Any, places: Any, found: Any) -> None:
            own = gather.group.rank()
            shards = gather._old.expand(*gather._shards.shape).contiguous()
            gather._coder.decode(messages, places, shards, own, found)
            if self.checks:
                others = [shard for row, shard in enumerate(shards) if row != own]
                self.decoded += len(others)
                self.wrong += sum(not torch.equal(shard, gather._own) for shard in others)
                self.wrong += int((found != 0).sum())

        reader: Any = WeightGather
        reader.read = read
