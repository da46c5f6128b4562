"""Lets Megatron's own training engine run on CPU over gloo, for trials, tests and CI.

megatron-core calls CUDA in many places that have nothing to do with its arithmetic: streams, memory
counters, device names, a random generator per device. When a run asks for `launch.device: cpu`, `install()`
replaces exactly those calls in this process; a comment at each replacement names the call of Megatron that
needs it. The arithmetic remains Megatron's and torch's own.

The run must have `--transformer-impl local`, `--distributed-backend gloo`, no fusions that need Apex or
Transformer Engine (`CPU_FLAGS`), and TORCHDYNAMO_DISABLE=1 before torch is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_patch.megatron import patching, symbols
from megatron_patch.megatron.cpu import bf16_products, torch_adam
from megatron_patch.megatron.cpu.cuda_calls import CPU, RANDOM, STAND_INS, Stream, answer, is_cuda, nothing
from megatron_patch.megatron.patching import View

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
    "no_gradient_reduce_div_fusion": True,  # Megatron-FSDP would have NCCL multiply, as gloo cannot
}
"""Megatron flags that a run on CPU needs, as `megatron:` keys of a configuration."""

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # megatron.core.jit compiles with inductor, which would build CPU kernels
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # asserted by Megatron's argument validation with TP on CUDA
    "GLOO_SOCKET_IFNAME": "lo",  # one machine: no look-up of the host's name
}
"""Environment variables that a single-node run on CPU needs before torch is imported."""

_RANDOM = "megatron.core.tensor_parallel.random"

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)


def _without_cuda_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that `device="cuda"` means the CPU, as in training_log's torch.tensor."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
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
        args = tuple(CPU if is_cuda(argument) else argument for argument in args)
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    def itself(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for name, method in {
        "type": type_,
        "to": to,  # dist_checkpointing, resharding of optimizer state
        "cuda": itself,  # pretrain_gpt.get_batch, checkpoint loading
        "pin_memory": itself,  # buffers' offload_to_cpu, data loaders
        "record_stream": nothing(),  # p2p communication, token dispatchers
    }.items():
        _put(f"torch:Tensor.{name}", method)
    _put("torch.nn:Module.cuda", itself)  # models.dist_utils moves the model


class Done:
    """The handle of a collective that has finished."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _stand_in_for_distributed() -> None:
    dist = torch.distributed

    def dropping(function: Callable[..., Any], key: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(key, None)
            return function(*args, **kwargs)

        return wrapped

    # initialize._initialize_distributed binds cuda:LOCAL_RANK; gloo refuses device ids in barriers.
    _put("torch.distributed:init_process_group", dropping(dist.init_process_group, "device_id"))
    _put("torch.distributed:barrier", dropping(dist.barrier, "device_ids"))

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
        # gloo refuses parts of different sizes. These are the tokens of each expert-tensor-parallel rank in
        # tensor_parallel.mappings._gather_along_first_dim, and the weights that each rank's layer-wise
        # optimizer updates (in param_and_grad_buffer, with overlap).
        sizes = [part.numel() for part in tensor_list]
        if len(set(sizes)) == 1:
            return original_gather(tensor_list, tensor, group=group, async_op=async_op)
        received = tensor.new_empty(sum(sizes))
        sent = tensor.detach().reshape(-1).repeat(len(sizes))
        original_exchange(received, sent, sizes, [tensor.numel()] * len(sizes), group=group)
        for part, values in zip(tensor_list, received.split(sizes), strict=True):
            part.copy_(values.view_as(part))
        return Done() if async_op else None

    _put("torch.distributed:all_to_all_single", all_to_all_single)
    _put("torch.distributed:all_gather", all_gather)

    mesh_of = DeviceMesh.from_group

    @functools.wraps(mesh_of)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return mesh_of(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    _put("torch.distributed.device_mesh:DeviceMesh.from_group", staticmethod(from_group))  # both FSDPs
    # Up to torch 2.11 a mesh of all ranks asks for NCCL where it sees a GPU.
    without_gpu = View(torch, cuda=View(torch.cuda, is_available=answer(False)))
    _put("torch.distributed.device_mesh:torch", without_gpu)


def _sequence_parallel_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: object, **kwargs: object
) -> torch.nn.Module:
    """Replaces transformer.torch_norm.WrappedTorchNorm, which refuses sequence parallelism.

    The parameters only need the attribute `sequence_parallel`, by which Megatron all-reduces their gradients
    over the tensor-parallel group (finalize_model_grads).
    """
    norm_class = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    norm = norm_class(normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _stand_in_for_megatron() -> None:
    _put(symbols.NORM, _sequence_parallel_norm)
    # initialize_megatron runs `make` on the data-set helper; the wheel ships it compiled.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        _put(symbols.COMPILE_HELPERS, nothing())
    patching.replace(symbols.RESULTS_QUEUE, _queue_of_this_process)
    torch_adam.install()
    logging.getLogger(_RANDOM).addFilter(_not_of_generators)
    for path in symbols.FSDP_DEVICES:
        patching.replace(path, _on_cpu, may_be_missing=True)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        patching.replace(symbols.TE_GEMM, lambda _: None, may_be_missing=True)


def _on_cpu(upstream: Any) -> Any:
    """Return the `torch` that Megatron-FSDP's modules use: a CUDA device that they construct is the CPU."""

    def device(*args: Any) -> torch.device:
        return CPU if is_cuda(str(args[0])) else torch.device(*args)

    return View(upstream, device=device)


def _not_of_generators(record: logging.LogRecord) -> bool:
    """Filter out the warning that dropout drew from the CPU's generator, which is the only one here."""
    return "CPU RNG state changed" not in str(record.msg)


def _queue_of_this_process(spawned: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_write_results_queue, whose queue is in a spawned process, unless async_save is on.

    The spawned process imports Megatron once more: for every rank it takes 5 seconds and 700 MB at the first
    save, and it survives a killed rank. Without async_save, queue and writer are in this process.
    """
    here: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        from megatron.training import global_vars

        in_background = getattr(global_vars._GLOBAL_ARGS, "async_save", False)
        return spawned(mp_mode) if in_background else here

    return get_write_results_queue


_stood_in: list[str] = []
"""The paths of the symbols that `_put` has replaced."""


def _put(path: str, value: Any) -> None:
    patching.replace(path, lambda _: value)
    _stood_in.append(path)


def installed() -> bool:
    """Whether `install` has replaced the calls in this process."""
    return bool(_stood_in)


def install() -> None:
    """Replace Megatron's CUDA calls in this process until `uninstall`; a second call does nothing.

    Call it before Megatron's modules are imported, because some bind torch.cuda's functions on import.

    Raises:
        RuntimeError: one of these modules is imported already.
    """
    if installed():
        return
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bound_too_early = [name for name in (_RANDOM, "megatron.training") if name in sys.modules]
    if bound_too_early:
        raise RuntimeError(f"cpu.device.install() must run before {bound_too_early[0]} is imported")

    for name, (stand_in, _) in STAND_INS.items():
        _put(f"torch.cuda:{name}", stand_in)
    for name in RANDOM:
        _put(f"torch.cuda.random:{name}", getattr(torch.cuda, name))
    for name in ("range_push", "range_pop"):  # core.utils.nvtx_range_push
        _put(f"torch.cuda.nvtx:{name}", nothing())
    _put("torch.accelerator:current_stream", answer(Stream()))  # autograd and checkpoint writers ask for it
    _put("torch.accelerator:current_device_index", answer(0))
    _put("torch.accelerator:is_available", answer(False))  # data loaders would pin memory in a thread
    for name in _FACTORIES:
        _put(f"torch:{name}", _without_cuda_device(getattr(torch, name)))
    _stand_in_for_tensor_methods()
    _stand_in_for_distributed()
    _stand_in_for_megatron()
    if bf16_products.needed():
        bf16_products.install()


def uninstall() -> None:
    """Restore the calls of torch and Megatron, except those that a module has bound on import."""
    patching.restore(*_stood_in, symbols.RESULTS_QUEUE, symbols.TE_GEMM, *symbols.FSDP_DEVICES)
    torch_adam.uninstall()
    logging.getLogger(_RANDOM).removeFilter(_not_of_generators)
    bf16_products.uninstall()
    _stood_in.clear()
