"""A GPU that keeps accounts instead of computing: torch.cuda, tensors' devices and Triton's launches.

Inside `recording()` a process without a GPU takes the code paths of one. Tensors have their numbers in the
host's memory, and torch computes them at once; but those that were made on device "cuda" say so, and every
operation on them is written down with its stream and its exact bytes (machine.py). Triton's kernels are not
run: `KERNELS` says what each argument is to them, and what a kernel only writes becomes 0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from order.machine import Machine, Queue
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_FACTORIES = ("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint")
_FACTORIES_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like")
_SYNCHRONIZING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
_NOTHING_LAUNCHED = (
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_unsafe_view",
    "aten::set_",
    "fsdp::record_grad_output_stream",
)

KERNELS: dict[str, dict[str, str]] = {
    "compress_kernel": {
        **dict.fromkeys(("gradient", "starts", "places", "diagonal"), "reads"),
        "payloads": "writes",
        **dict.fromkeys(("error", "error_scales", "statistics"), "changes"),
    },
    "decompress_reduce_kernel": {
        **dict.fromkeys(("words", "scales", "places", "diagonal"), "reads"),
        "output": "writes",
    },
    "count_kernel": {"old": "reads", "new": "reads", "counts": "changes", "sums": "writes"},
    "frequencies_kernel": {
        **dict.fromkeys(("counts", "exponents"), "reads"),
        **dict.fromkeys(("frequencies", "starts", "costs"), "writes"),
    },
    "list_kernel": {
        **dict.fromkeys(("frequencies", "starts"), "reads"),
        "table": "writes",
        "numbers": "changes",
    },
    "front_kernel": {
        **dict.fromkeys(("exponents", "frequencies", "numbers", "costs"), "reads"),
        "front": "changes",
        "plan": "writes",
    },
    "encode_kernel": {
        **dict.fromkeys(("old", "new", "table", "plan"), "reads"),
        **dict.fromkeys(("words", "counts", "states"), "changes"),
    },
    "pack_kernel": {
        **dict.fromkeys(("front", "plan", "counts", "ends", "states", "words"), "reads"),
        "message": "changes",
    },
    "read_kernel": {
        **dict.fromkeys(("messages", "places"), "reads"),
        **dict.fromkeys(("table", "plans"), "writes"),
        "wrong": "changes",
    },
    "sizes_kernel": {**dict.fromkeys(("messages", "places", "plans"), "reads"), "sizes": "writes"},
    "decode_kernel": {
        **dict.fromkeys(("messages", "places", "table", "plans", "ends"), "reads"),
        **dict.fromkeys(("shards", "wrong"), "changes"),
    },
    "verdict_kernel": {
        **dict.fromkeys(("messages", "places", "plans", "ends", "wrong", "sums"), "reads"),
        "verdicts": "writes",
    },
    "sums_kernel": {"weights": "reads", "sums": "changes"},
    "_fold_kernel": {"stretches": "reads", "signs": "reads", "sums": "writes"},
}
"""What a kernel does with an argument; one that is both read, for one element, and written, for another,
changes. An argument that is unused is given some other one's tensor, which the kernel does not touch."""


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.recorded: np.ndarray | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or active().current
        self.recorded = active().machine.record(stream.queue)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active().current).wait_event(self)

    def query(self) -> bool:
        return self.recorded is None or active().machine.over(self.recorded)

    def synchronize(self) -> None:
        if self.recorded is not None:
            active().machine.wait_on_host(self.recorded)

    def elapsed_time(self, end: Event) -> float:
        """CUDA's raises an error where one of them was not recorded, or is not over."""
        for event in (self, end):
            if event.recorded is None or not event.query():
                active().machine.found.append("elapsed_time of an event that nothing has waited for")
        return 1.0


class Stream:
    """torch.cuda.Stream."""

    device, device_index, device_type = CUDA, 0, 1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        machine = active().machine
        self.queue: Queue = machine.queue(f"stream {len(machine.queues)}")

    @property
    def cuda_stream(self) -> int:
        return 1 + self.queue.number

    stream_id = cuda_stream

    def wait_event(self, event: Event) -> None:
        if event.recorded is not None:
            active().machine.wait(self.queue, event.recorded)

    def wait_stream(self, other: Stream) -> None:
        active().machine.wait(self.queue, active().machine.record(other.queue))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        active().machine.wait_on_host(active().machine.record(self.queue))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _On:
    """torch.cuda.stream(...); one of them may be entered again and again."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._outer: list[Stream] = []

    def __enter__(self) -> None:
        self._outer.append(active().current)
        if self._stream is not None:
            active().current = self._stream

    def __exit__(self, *_: object) -> None:
        active().current = self._outer.pop()


class Generator(torch.Generator):
    """torch.Generator, of any device."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


class GPU:
    """What the stand-ins share while they are in place."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.at_home = 0
        """Above 0: all tensors are made on the GPU, as by a builder of models."""
        self.pinned = WeakTensorKeyDictionary()
        """By tensor in pinned memory of the host, which is copied without waiting: the event after the last
        copy into it."""
        self.current: Stream = None  # type: ignore[assignment]

    def synchronize(self) -> None:
        """The host waits for all that was launched."""
        for queue in self.machine.queues:
            self.machine.wait_on_host(self.machine.record(queue))

    def synchronize_current(self) -> None:
        self.current.synchronize()

    @contextlib.contextmanager
    def all_made_here(self) -> Iterator[None]:
        """Within the block every new tensor is on the GPU."""
        self.at_home += 1
        try:
            yield
        finally:
            self.at_home -= 1

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor of the host is in pinned memory."""
        self.pinned[tensor] = self.machine.record(self.current.queue)
        return tensor

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """The host reads a tensor of its own."""
        if tensor in self.pinned and not self.machine.over(self.pinned[tensor]):
            self.machine.found.append("the host reads what a copy on the GPU may not have written yet")

    def made(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """A new tensor is on the GPU, and its numbers are there."""
        self.machine.allocate(tensor, self.current.queue, what)
        return tensor


_active: list[GPU] = []


def active() -> GPU:
    """The GPU of this process."""
    return _active[-1]


class _Dispatch(TorchDispatchMode):
    """Writes torch's own operations down."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.namespace not in ("aten", "fsdp") or func._schema.name in _NOTHING_LAUNCHED:
            return result
        gpu = active()
        machine = gpu.machine
        inputs = list(_tensors(args)) + list(_tensors(kwargs.values()))
        there = any(machine.holds(tensor) for tensor in inputs)
        outputs = list(_tensors((result,)))
        name = func._schema.name.rpartition("::")[2]
        if not there and not gpu.at_home:
            return result
        changed = [tensor for argument in _changed(func, args, kwargs) for tensor in _tensors((argument,))]
        here = bool(changed) and not machine.holds(changed[0])
        if there and here and func._schema.name == "aten::copy_":  # to the host
            machine.launch(gpu.current.queue, name, reads=inputs)
            if changed[0] in gpu.pinned and _waits_not(args, kwargs):
                gpu.pinned[changed[0]] = machine.record(gpu.current.queue)
            else:
                gpu.synchronize_current()
            return result
        for tensor in outputs:
            if not here:
                machine.allocate(tensor, gpu.current.queue, name)
        if name.startswith(("empty", "new_empty")):
            return result
        machine.launch(gpu.current.queue, name, reads=inputs, writes=[*changed, *outputs])
        from_host = [tensor for tensor in inputs if not machine.holds(tensor) and tensor.dim()]
        if func._schema.name in _SYNCHRONIZING or (name == "copy_" and from_host):
            gpu.synchronize_current()
        return result


def _waits_not(args: Any, kwargs: Any) -> bool:
    """Whether a copy_ is non_blocking."""
    return bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@functools.cache
def _changed_arguments(func: Any) -> list[tuple[int, str]]:
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for place, name in _changed_arguments(func):
        if place < len(args):
            yield args[place]
        elif name in kwargs:
            yield kwargs[name]


def _is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _factory(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def factory(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            with _disable_current_modes():
                return active().pin(original(*args, **kwargs))
        if not _is_cuda(device):
            return original(*args, **kwargs)
        with _disable_current_modes():
            made = original(*args, **kwargs)
        return active().made(made, original.__name__)

    return factory


def _to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        devices = [one for one in args if isinstance(one, (torch.device, str))]
        device = kwargs.pop("device", devices[0] if devices else None)
        waits_not = kwargs.pop("non_blocking", False) and self in active().pinned
        args = tuple(one for one in args if isinstance(one, (torch.dtype, torch.Tensor)))
        here = self
        if device is not None and _is_cuda(device) != active().machine.holds(self):
            here = _uploaded(self, not waits_not) if _is_cuda(device) else _downloaded(self)
        return original(here, *args, **kwargs) if args or kwargs else here

    return to


def _uploaded(tensor: torch.Tensor, waits: bool = True) -> torch.Tensor:
    """A copy on the GPU. torch waits for copies of pageable memory."""
    with _disable_current_modes():
        copy = tensor.detach().clone()
    active().made(copy, "copy from the host")
    active().machine.launch(active().current.queue, "copy from the host", writes=[copy])
    if waits:
        active().synchronize_current()
    return copy


def _downloaded(tensor: torch.Tensor) -> torch.Tensor:
    active().machine.launch(active().current.queue, "copy to the host", reads=[tensor])
    active().synchronize_current()
    with _disable_current_modes():
        return tensor.detach().clone()


def _cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self if active().machine.holds(self) else _uploaded(self)


def _cpu(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _downloaded(self) if active().machine.holds(self) else self


def _tolist(original: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(self: torch.Tensor) -> Any:
        active().read_on_host(self)
        return original(_cpu(self))

    return tolist


def _new_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            made = original(self, *args, **kwargs)
        return active().made(made, "new_tensor") if active().machine.holds(self) else made

    return new_tensor


def _device(self: torch.Tensor) -> torch.device:
    return CUDA if active().machine.holds(self) else CPU


def _record_stream(self: torch.Tensor, stream: Stream) -> None:
    if active().machine.holds(self):
        active().machine.record_stream(self, stream.queue)


def _launcher(kernel: Any, grid: Any) -> Callable[..., None]:
    """What `kernel[grid]` is: the launch, written down."""
    name = kernel.fn.__name__
    roles = KERNELS[name]
    parameters = _signature(kernel.fn)

    def launch(*args: Any, **options: Any) -> None:
        named = {key: value for key, value in options.items() if key in parameters.parameters}
        given = parameters.bind(*args, **named).arguments
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        assert set(roles) <= set(given), f"{name} has other parameters than KERNELS says"
        written = [tensors[key] for key, role in roles.items() if role == "writes"]
        used = {id(tensor) for key, tensor in tensors.items() if roles.get(key) != "reads"}
        reads = [
            tensor for key, tensor in tensors.items() if roles.get(key) == "reads" and id(tensor) not in used
        ]
        changes = [
            tensor
            for key, tensor in tensors.items()
            if roles.get(key) == "changes" and all(tensor is not one for one in written)
        ]
        gpu = active()
        for tensor in (*reads, *changes, *written):
            if not gpu.machine.holds(tensor):
                gpu.machine.found.append(f"{name} is given a tensor of the host")
        queue = gpu.current.queue
        gpu.machine.launch(queue, name, reads=reads, writes=[*changes, *written])
        if name in _TABLES:
            gpu.machine.launch_on_bytes(queue, name, _TABLES[name](given))
        with _disable_current_modes(), torch.no_grad():
            for tensor in written:
                tensor.zero_()

    return launch


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _of_fold(given: dict[str, Any]) -> Iterator[tuple[int, int, bool]]:
    size = {"fp32": 4}.get(str(given["ELEMENT"]), 2)
    with _disable_current_modes():
        rows = given["stretches"].numpy()
    for address, length, _, _ in rows:
        yield int(address), int(length) * size, False


_TABLES: dict[str, Callable[[dict[str, Any]], Iterator[tuple[int, int, bool]]]] = {"_fold_kernel": _of_fold}
"""Kernels that find their tensors' addresses in a table."""


class _Properties:
    """An H100's, as far as anyone asks."""

    name = "accounts"
    major, minor = 9, 0
    multi_processor_count = 132
    regs_per_multiprocessor = 65536
    shared_memory_per_multiprocessor = 233472
    max_threads_per_multi_processor = 2048


def _forget_what_is_on_a_device() -> None:
    """Tables that the package makes once for each device: this GPU is a new one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_patch."):
            for value in vars(module).values():
                clear = getattr(value, "cache_clear", None)
                if clear is not None and getattr(value, "__module__", "").startswith("megatron_patch."):
                    clear()


@contextlib.contextmanager
def recording() -> Iterator[GPU]:
    """A GPU for the length of the block."""
    _forget_what_is_on_a_device()
    with contextlib.ExitStack() as stack:
        gpu = GPU()
        _active.append(gpu)
        stack.callback(_active.pop)
        gpu.current = default = Stream()
        default.queue.name = "the default stream"

        def put(owner: Any, name: str, value: Any) -> None:
            own = name in vars(owner)
            original = vars(owner).get(name)
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, original) if own else stack.callback(delattr, owner, name)

        cuda = torch.cuda
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": _On,
            "current_stream": lambda *_: gpu.current,
            "default_stream": lambda *_: default,
            "synchronize": lambda *_: gpu.synchronize(),
            "current_device": lambda: 0,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_properties": lambda *_: _Properties(),
            "is_current_stream_capturing": lambda: False,
        }.items():
            put(cuda, name, value)
        for name in _FACTORIES + _FACTORIES_LIKE:
            put(torch, name, _factory(getattr(torch, name)))
        put(torch, "Generator", Generator)
        for name, wrap in {"to": _to, "tolist": _tolist, "new_tensor": _new_tensor}.items():
            put(torch.Tensor, name, wrap(getattr(torch.Tensor, name)))
        for name, value in {
            "cuda": _cuda,
            "cpu": _cpu,
            "device": property(_device),
            "is_cuda": property(lambda self: gpu.machine.holds(self)),
            "record_stream": _record_stream,
        }.items():
            put(torch.Tensor, name, value)
        for kernels in (KernelInterface, InterpretedFunction):  # the second is of its own until Triton 3.5
            put(kernels, "__getitem__", _launcher)
        put(torch, "equal", lambda one, other: True)  # Nothing holds what kernels would have written.
        stack.enter_context(_Dispatch())
        yield gpu
        gpu.machine.ended = True
