"""Lets Megatron's own training engine run on CPU over gloo, for trials, tests and CI.

megatron-core calls CUDA in many places that have nothing to do with its arithmetic: streams, memory
counters, device names, a random generator per device. `install()` replaces exactly those calls, for
this process, when a run asks for `launch.device: cpu`; nothing here is touched otherwise. Every
stand-in stands beside the call of Megatron that needs it. The arithmetic is Megatron's and torch's own.

Requirements on the run: `--transformer-impl local`, `--distributed-backend gloo`, fusions that need
Apex or Transformer Engine off (`CPU_FLAGS`), and TORCHDYNAMO_DISABLE=1 before torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

import torch

CPU_FLAGS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "no_bias_swiglu_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_rope_fusion": True,
}
"""Megatron flags that a run on CPU needs, as `megatron:` keys of a configuration."""

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # megatron.core.jit compiles with inductor, which would build CPU kernels
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # asserted by Megatron's argument validation with TP on CUDA
    "GLOO_SOCKET_IFNAME": "lo",  # one machine: no look-up of the host's name
}
"""Environment variables of a single-node run on CPU; set before torch is imported."""

_CPU = torch.device("cpu")
_installed = False


class _Stream:
    """An inert stream: on CPU every call has finished when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0
        self.device = _CPU

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing()

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class _Event(_Stream):
    """An inert event, already complete."""

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Generators:
    """`torch.cuda.default_generators[i]`: the CPU's generator for every index."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


class _Properties:
    """`torch.cuda.get_device_properties`: no Tensor Cores, so no path that asks for them."""

    name = "cpu"
    major = minor = 0
    multi_processor_count = os.cpu_count() or 1
    total_memory = 0


def _answer(value: Any) -> Callable[..., Any]:
    """A function of its own for every call that it stands in for: torch._dynamo refuses one in two places."""
    return lambda *args, **kwargs: value


def _nothing() -> Callable[..., None]:
    return _answer(None)


def _null_context(*args: object, **kwargs: object) -> contextlib.nullcontext[None]:
    # Not a generator's context: several optimizer instances enter one torch.cuda.stream(...) twice.
    return contextlib.nullcontext()


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _call_now(callable_: Callable[[], None], **kwargs: object) -> None:
    callable_()


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


# torch.cuda.NAME -> (stand-in, the call of Megatron that needs it)
_CUDA_STAND_INS: dict[str, tuple[Any, str]] = {
    "is_available": (_answer(True), "training.initialize.initialize_megatron asserts it"),
    "device_count": (_answer(1), "initialize._set_random_seed seeds the tracker only if > 0"),
    "current_device": (_answer(_CPU), "device=torch.cuda.current_device() in tensor factories, everywhere"),
    "set_device": (_nothing(), "initialize._initialize_distributed"),
    "is_initialized": (_answer(False), "core.utils, checkpoint workers"),
    "init": (_nothing(), "dist_checkpointing.strategies.filesystem_async"),
    "_lazy_init": (_nothing(), "tensor_parallel.random._get_cuda_rng_state"),
    "_lazy_call": (_call_now, "tensor_parallel.random._set_cuda_rng_state"),
    "device": (_null_context, "tensor_parallel.random: device_ctx_manager"),
    "default_generators": (_Generators(), "tensor_parallel.random._set_cuda_rng_state"),
    "get_rng_state": (_get_rng_state, "CudaRNGStatesTracker.add, checkpointing.get_rng_state"),
    "set_rng_state": (_set_rng_state, "rerun_state_machine, checkpointing"),
    "manual_seed": (_manual_seed, "CudaRNGStatesTracker.add"),
    "manual_seed_all": (_nothing(), "torch.manual_seed seeds the CPU's generator already"),
    "Stream": (_Stream, "DistributedDataParallel.__init__, models.dist_utils._ddp_wrap"),
    "Event": (_Event, "pipeline_parallel, moe token dispatchers"),
    "stream": (_null_context, "models.dist_utils._ddp_wrap"),
    "current_stream": (_answer(_Stream()), "bucket groups' start_grad_sync and finish_grad_sync"),
    "default_stream": (_answer(_Stream()), "pipeline_parallel.utils"),
    "synchronize": (_nothing(), "core.timers, training.training"),
    "empty_cache": (_nothing(), "training.training.save_checkpoint_and_time, set_jit_fusion_options"),
    "memory_allocated": (_answer(0), "training.utils.report_memory"),
    "max_memory_allocated": (_answer(0), "training.utils.report_memory"),
    "memory_reserved": (_answer(0), "training.utils.report_memory"),
    "max_memory_reserved": (_answer(0), "training.utils.report_memory"),
    "device_memory_used": (_answer(0), "training.utils.report_memory"),
    "reset_peak_memory_stats": (_nothing(), "training.training"),
    "mem_get_info": (_answer((0, 0)), "dist_checkpointing"),
    "get_device_properties": (_answer(_Properties()), "training.utils.get_device_arch_version"),
    "get_device_capability": (_answer((0, 0)), "fp8 and attention back-end checks"),
    "get_device_name": (_answer("cpu"), "rerun_state_machine reports"),
    "is_current_stream_capturing": (_answer(False), "transformer.cuda_graphs"),
}
_CUDA_RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)


def _without_cuda_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`device="cuda"` in tensor factories, e.g. training.training.training_log's torch.tensor."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)

    return factory


def _stand_in_for_tensor_methods() -> None:
    original_type, original_to = torch.Tensor.type, torch.Tensor.to

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # DistributedOptimizer compares these strings to tell parameters' dtypes.
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, *args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_CPU if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    def itself(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for name, method in {
        "type": type_,
        "to": to,  # dist_checkpointing, resharding of optimizer state
        "cuda": itself,  # pretrain_gpt.get_batch, checkpoint loading
        "pin_memory": itself,  # buffers' offload_to_cpu, data loaders
        "record_stream": _nothing(),  # p2p communication, token dispatchers
    }.items():
        setattr(torch.Tensor, name, method)
    torch.nn.Module.cuda = itself  # type: ignore[method-assign]  # models.dist_utils moves the model


def _stand_in_for_distributed() -> None:
    dist = torch.distributed

    def dropping(function: Callable[..., Any], key: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(key, None)
            return function(*args, **kwargs)

        return wrapped

    # initialize._initialize_distributed binds cuda:LOCAL_RANK; gloo refuses device ids in barriers.
    dist.init_process_group = dropping(dist.init_process_group, "device_id")
    dist.barrier = dropping(dist.barrier, "device_ids")

    original_exchange, original_gather = dist.all_to_all_single, dist.all_gather

    @functools.wraps(original_exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # tensor_parallel.mappings._AllToAll passes NumPy or tensor sizes, which gloo does not take.
        def as_list(sizes: Any) -> Any:
            return sizes if sizes is None else [int(size) for size in sizes]

        return original_exchange(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), *args, **kwargs
        )

    @functools.wraps(original_gather)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        # Parts of different sizes, which gloo refuses: the tokens of each expert-tensor-parallel rank in
        # tensor_parallel.mappings._gather_along_first_dim.
        sizes = [part.numel() for part in tensor_list]
        if async_op or len(set(sizes)) == 1:
            return original_gather(tensor_list, tensor, group=group, async_op=async_op)
        received = tensor.new_empty(sum(sizes))
        sent = tensor.detach().reshape(-1).repeat(len(sizes))
        original_exchange(received, sent, sizes, [tensor.numel()] * len(sizes), group=group)
        for part, values in zip(tensor_list, received.split(sizes), strict=True):
            part.copy_(values.view_as(part))
        return None

    dist.all_to_all_single = all_to_all_single
    dist.all_gather = all_gather


def _sequence_parallel_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: object, **kwargs: object
) -> torch.nn.Module:
    """transformer.torch_norm.WrappedTorchNorm, which asserts sequence parallelism off; it only needs marks.

    Megatron all-reduces gradients of parameters marked `sequence_parallel` over the tensor-parallel
    group (finalize_model_grads), which is all that a norm needs there.
    """
    norm_class = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    norm = norm_class(normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _stand_in_for_megatron() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = _sequence_parallel_norm

    # initialize_megatron runs `make` on the data-set helper; the wheel ships it compiled.
    from megatron.core.datasets import utils as dataset_utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = _nothing()

    # A queue in a process of its own, which is spawned: with a script in the place of __main__ that imports
    # Megatron once more, 5 seconds and 700 MB for every rank at its first save, and outlives a killed rank.
    # Without async_save, queue and writer are in this very process.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spawned = filesystem_async.get_write_results_queue
    here: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        from megatron.training import global_vars

        in_background = getattr(global_vars._GLOBAL_ARGS, "async_save", False)
        return spawned(mp_mode) if in_background else here

    filesystem_async.get_write_results_queue = get_write_results_queue

    from megatron_patch.integration.cpu import torch_adam

    torch_adam.install()

    # Undefined without Transformer Engine in some releases, and tested against None before use.
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def installed() -> bool:
    """Whether this process runs Megatron on CPU by these stand-ins."""
    return _installed


def install() -> None:
    """Stand in for the CUDA calls of Megatron in this process. Idempotent; there is no way back.

    Call it before Megatron's modules are imported: some bind torch.cuda's functions on import.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bound_too_early = [
        name for name in ("megatron.core.tensor_parallel.random", "megatron.training") if name in sys.modules
    ]
    if bound_too_early:
        raise RuntimeError(f"cpu_device.install() must run before {bound_too_early[0]} is imported")

    for name, (stand_in, _) in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    for name in _CUDA_RANDOM:
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop"):  # core.utils.nvtx_range_push
        setattr(torch.cuda.nvtx, name, _nothing())
    torch.accelerator.current_stream = _answer(_Stream())  # autograd and checkpoint writers ask for it
    torch.accelerator.current_device_index = _answer(0)
    torch.accelerator.is_available = _answer(False)  # data loaders would pin memory in a thread
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda_device(getattr(torch, name)))
    _stand_in_for_tensor_methods()
    _stand_in_for_distributed()
    _stand_in_for_megatron()
