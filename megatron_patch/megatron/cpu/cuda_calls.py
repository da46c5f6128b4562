"""Replacements of torch.cuda's functions on CPU: streams, events, generators, memory counters.

`STAND_INS` names, with each replacement, the call of Megatron that needs it.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Stream:
    """An inert stream: on CPU every call has finished when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0
        self.device = CPU

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing()

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event(Stream):
    """An inert event, already complete."""

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Generators:
    """Replaces `torch.cuda.default_generators`: every index gives the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


class _Properties:
    """Replaces the result of `torch.cuda.get_device_properties`: a device without Tensor Cores."""

    name = "cpu"
    major = minor = 0
    multi_processor_count = os.cpu_count() or 1
    total_memory = 0


def answer(value: Any) -> Callable[..., Any]:
    """Return a new function that returns `value`; torch._dynamo refuses one function in two places."""
    return lambda *args, **kwargs: value


def nothing() -> Callable[..., None]:
    return answer(None)


def _null_context(*args: object, **kwargs: object) -> contextlib.nullcontext[None]:
    # A context made of a generator would not do: optimizer instances enter one torch.cuda.stream(...) twice.
    return contextlib.nullcontext()


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _call_now(callable_: Callable[[], None], **kwargs: object) -> None:
    callable_()


def is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


# torch.cuda.NAME -> (stand-in, the call of Megatron that needs it)
STAND_INS: dict[str, tuple[Any, str]] = {
    "is_available": (answer(True), "training.initialize.initialize_megatron asserts it"),
    "device_count": (answer(1), "initialize._set_random_seed seeds the tracker only if > 0"),
    "current_device": (answer(CPU), "device=torch.cuda.current_device() in tensor factories, everywhere"),
    "set_device": (nothing(), "initialize._initialize_distributed"),
    "is_initialized": (answer(False), "core.utils, checkpoint workers"),
    "init": (nothing(), "dist_checkpointing.strategies.filesystem_async"),
    "_lazy_init": (nothing(), "tensor_parallel.random._get_cuda_rng_state"),
    "_lazy_call": (_call_now, "tensor_parallel.random._set_cuda_rng_state"),
    "device": (_null_context, "tensor_parallel.random: device_ctx_manager"),
    "default_generators": (_Generators(), "tensor_parallel.random._set_cuda_rng_state"),
    "get_rng_state": (_get_rng_state, "CudaRNGStatesTracker.add, checkpointing.get_rng_state"),
    "set_rng_state": (_set_rng_state, "rerun_state_machine, checkpointing"),
    "manual_seed": (_manual_seed, "CudaRNGStatesTracker.add"),
    "manual_seed_all": (nothing(), "torch.manual_seed seeds the CPU's generator already"),
    "Stream": (Stream, "DistributedDataParallel.__init__, models.dist_utils._ddp_wrap"),
    "Event": (Event, "pipeline_parallel, moe token dispatchers"),
    "stream": (_null_context, "models.dist_utils._ddp_wrap"),
    "current_stream": (answer(Stream()), "bucket groups' start_grad_sync and finish_grad_sync"),
    "default_stream": (answer(Stream()), "pipeline_parallel.utils"),
    "synchronize": (nothing(), "core.timers, training.training"),
    "empty_cache": (nothing(), "training.training.save_checkpoint_and_time, set_jit_fusion_options"),
    "memory_allocated": (answer(0), "training.utils.report_memory"),
    "max_memory_allocated": (answer(0), "training.utils.report_memory"),
    "memory_reserved": (answer(0), "training.utils.report_memory"),
    "max_memory_reserved": (answer(0), "training.utils.report_memory"),
    "memory_stats": (answer(collections.defaultdict(int)), "training.training: --log-memory-to-tensorboard"),
    "device_memory_used": (answer(0), "training.utils.report_memory"),
    "reset_peak_memory_stats": (nothing(), "training.training"),
    "mem_get_info": (answer((0, 0)), "dist_checkpointing"),
    "get_device_properties": (answer(_Properties()), "training.utils.get_device_arch_version"),
    "get_device_capability": (answer((0, 0)), "fp8 and attention back-end checks"),
    "get_device_name": (answer("cpu"), "rerun_state_machine reports"),
    "is_current_stream_capturing": (answer(False), "transformer.cuda_graphs"),
}
RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")
