"""The hooks under PyTorch's DDP and FSDP2 on a recording GPU.

DDP's reducer is C++, and allocates what nobody sees: its buckets, its calls of the hook and its waits for the
hook's futures are stated here, in their order (torch/csrc/distributed/c10d/reducer.cpp). FSDP2's parameter
groups are torch's own, on the CPU, as far as `post_backward`: from there on, gradients, streams and buffers
are the GPU's, and torch's `foreach_reduce` is run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from order.gpu import CUDA, GPU, active
from order.recorded_collectives import Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from megatron_patch.pytorch import ddp
from megatron_patch.pytorch.fsdp2 import Fsdp2

SHAPES = ((24, 32), (32,), (40, 16), (16,))
"""Of the parameters of a layer."""
LAYERS = 3


class Future:
    """torch.futures.Future: done where its result was set, and waited for by the stream that waits for it."""

    def __init__(self, devices: Any = None) -> None:
        self.result: Any = None

    def set_result(self, result: Any) -> None:
        self.result, self._end = result, active().machine.record(active().current.queue)

    def wait(self) -> Any:
        active().machine.wait(active().current.queue, self._end)
        return self.result


class Reduced:
    """What DDP's uncompressed all-reduce returns, and the hook's `get_future().then(...)` of it."""

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def get_future(self) -> Reduced:
        return self

    def then(self, call: Callable[[Any], Any]) -> Reduced:
        self.result = call(SimpleNamespace(value=lambda: [self._tensor]))
        return self

    def wait(self) -> Any:
        self._work.wait()
        return self.result


class Bucket:
    """dist.GradBucket."""

    def __init__(self, number: int, parameters: list[nn.Parameter]) -> None:
        self.buffers = torch.zeros(sum(p.numel() for p in parameters), device=CUDA)
        self.index = lambda: number
        self.is_last = lambda: number == LAYERS - 1
        self.parameters = lambda: parameters
        self.buffer = lambda: self.buffers


class Wrapped(nn.Module):
    """What the package asks of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.process_group, self._comm_hooks = module, dist.group.WORLD, []
        self.static_graph = False

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters = list(self.parameters())
        return parameters, [False] * len(parameters)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self.hook = lambda bucket: hook(state, bucket)
        self._comm_hooks.append((hook, state))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape)))


def _layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def train_ddp(config: Any, gpu: GPU, recorder: Recorder, steps: int) -> None:
    """Backward passes and optimizer's steps of a model whose layers are DDP's buckets."""
    with gpu.all_made_here():
        model = Wrapped(_layers())
    all_reduce = dist.all_reduce

    def with_future(tensor: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
        work = all_reduce(tensor, *args, async_op=async_op, **options)
        return Reduced(tensor, work) if async_op else work

    with mock.patch.object(ddp, "Future", Future), mock.patch.object(dist, "all_reduce", with_future):
        attached = ddp.Ddp(model, config)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
        layers = [list(layer.parameters()) for layer in reversed(model.module)]
        buckets = [Bucket(number, parameters) for number, parameters in enumerate(layers)]
        for _ in range(steps):
            futures = []
            for bucket in buckets:
                with gpu.all_made_here():
                    bucket.buffers.copy_(torch.randn(bucket.buffers.shape))  # what autograd has computed
                futures.append(model.hook(bucket))
            for bucket, future in zip(buckets, futures, strict=True):
                sizes = [p.numel() for p in bucket.parameters()]
                for parameter, gradient in zip(bucket.parameters(), future.wait().split(sizes), strict=True):
                    parameter.grad = gradient.view(parameter.shape).clone()
            futures.clear()
            optimizer.step()
            optimizer.zero_grad()
            attached.session.report.compression_seconds()
            recorder.end_step()


def sharded(replicas: int) -> nn.Module:
    """A model whose layers are FSDP2's parameter groups, on the CPU: for `train_fsdp2`."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=names)
    model = _layers()
    for layer in model:
        fully_shard(layer, mesh=mesh if replicas > 1 else mesh["shard"])
    for group in _groups(model):
        group.lazy_init()
    return model


def _groups(model: nn.Module) -> list[Any]:
    return [group for layer in model for group in layer._get_fsdp_state()._fsdp_param_groups]


def train_fsdp2(model: nn.Module, config: Any, gpu: GPU, recorder: Recorder, steps: int) -> None:
    """Backward passes and optimizer's steps of a model that `sharded` has made.

    With replicas every other step has two microbatches, of which the first is not all-reduced.
    """
    streams, groups = FSDPCommContext(), _groups(model)
    streams.lazy_init(CUDA)
    for group in groups:
        group.comm_ctx, group.device, group.device_handle = streams, CUDA, torch.cuda
        group.reshard_after_backward = False
        for parameter in group.fsdp_params:
            with gpu.all_made_here():
                own = nn.Parameter(torch.randn(parameter.sharded_size))
            # The gradients' owner is a tensor of the GPU's, and no DTensor, which has a device of its own.
            parameter.sharded_param, parameter.to_sharded_dtensor = own, lambda gradient: gradient
            parameter._unsharded_param = SimpleNamespace(grad=None, requires_grad=True)
    attached = Fsdp2(model, config, None)
    optimizer = torch.optim.SGD([p.sharded_param for g in groups for p in g.fsdp_params], 1e-3, foreach=False)
    for step in range(steps):
        microbatches = 1 + (attached.replicas is not None and step % 2)
        for microbatch in range(microbatches):
            for group in reversed(groups):
                group.all_reduce_grads = microbatch == microbatches - 1
                for parameter in group.fsdp_params:
                    with gpu.all_made_here():
                        parameter._unsharded_param.grad = torch.randn(parameter._orig_size)
                group.post_backward()
            for event in streams._last_post_reduce_events.values():  # FSDPState._root_post_backward...
                torch.cuda.current_stream().wait_event(event)
            streams._last_post_reduce_events.clear()
            for state in streams.reduce_scatter_states:
                torch.cuda.current_stream().wait_event(state.event)
            streams.reduce_scatter_states.clear()
            for group in groups:
                group.finalize_backward()
            if microbatch < microbatches - 1:
                optimizer.zero_grad()  # torch would add to the zeros that wait here, of a DTensor
        optimizer.step()
        # Gradients are freed on the stream that they were reduced on, whose next allocation is within
        # `foreach_reduce`, after this wait.
        streams.reduce_scatter_stream.wait_stream(torch.cuda.current_stream())
        optimizer.zero_grad()
        attached.session.report.compression_seconds()
        recorder.end_step()
