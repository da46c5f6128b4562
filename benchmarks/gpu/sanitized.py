"""Parts of benchmarks.gpu: two sanitizers, each beside an error that is planted for it to find.

memory    launches of every kernel at odd sizes under compute-sanitizer, without torch's caching allocator
          (PYTORCH_NO_CUDA_MEMORY_CACHING=1): a kernel that read past a tensor would read torch's own memory
planted   a kernel that writes behind a tensor, in the same way
order     steps with the exact gather under torch's sanitizer (TORCH_CUDA_SANITIZER=1), which is told of
          Triton's launches; first a race between two streams
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")

import torch
import triton

from benchmarks.gpu import bits
from benchmarks.gpu.kernels import planted_kernel
from benchmarks.gpu.part import DEVICE, ON_GPU, attempt, remains, synchronize, tell


def memory(layouts: int) -> None:
    draw = random.Random(11)
    for numel in (1, 333, 70_001) if ON_GPU else (1, 33):
        bits.check_weights(numel, 3, 3, 0.4, "normal", False)
    number = 0
    while number < layouts and remains() > 30:
        codec = bits.CODECS[number % len(bits.CODECS)]
        size, shards, spans = ((7001, 2, 5), (5000, 3, None), (1 << 14, 4, None))[number // len(bits.CODECS)]
        of = bits.random_spans(size, spans, exact=True) if spans else None
        layout = bits.BlockLayout.of(size, shards, codec.bits, 128, spans=of)
        given: dict[str, Any] = {"kind": "plain", "seed": 3, "device": DEVICE}
        given["dtype"] = draw.choice([torch.float32, torch.bfloat16])
        kernels = bits.triton_kernels
        bits.check_compress(kernels, codec, layout, error_dtype="int8", beta=0.8, **given)
        bits.check_decompress_reduce(kernels, codec, layout, senders=3, average=True, **given)
        if spans is None:
            bits.check_decompress(kernels, codec, layout, **given)
        number += 1
    synchronize()
    tell(checks={f"there is time for all {layouts} layouts": number == layouts}, layouts=number)


def planted() -> None:
    if ON_GPU:
        planted_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=DEVICE))
        torch.cuda.synchronize()


def stream_order(name: str) -> None:
    from benchmarks.gpu import model
    from benchmarks.gpu.twin_group import TwinsRead

    model.one_of(4)
    if ON_GPU:
        tell(checks={"the planted race is found": _planted_race()})
        _tell_launches()
    TwinsRead().checks = False
    for method in ("stock", "loco", "loco+exact"):
        attempt(method, _steps, model, name, method)


def _steps(model: Any, name: str, method: str) -> None:
    _launched["told"] = _launched["races"] = 0
    training = model.megatron(model.SHAPES[name], method, bucket=1_000_000)
    for _ in range(3):
        training.step(1)
    checks = {f"{method}: steps end": float(training.losses[0]["loss"]) < 1e9}
    if ON_GPU:
        checks[f"{method}: no race of Triton's launches"] = not _launched["races"]
        if method != "stock":
            checks[f"{method}: Triton's launches are told"] = _launched["told"] > 0
    tell(checks=checks)
    training.close()


_launched = {"told": 0, "races": 0}


def _tell_launches() -> None:
    """Have Triton's launches told to torch's sanitizer."""
    from torch.cuda import _sanitizer

    handler: Any = _sanitizer.cuda_sanitizer.dispatch.event_handler
    run = triton.JITFunction.run

    def telling(kernel: Any, *args: Any, **options: Any) -> Any:
        if not options.get("warmup"):
            named = dict(zip(kernel.arg_names, args, strict=False)) | options
            stream = torch.cuda.current_stream().cuda_stream
            for race in races(handler, stream, kernel.fn.__name__, named):
                print(race, flush=True)
                _launched["races"] += 1
        return run(kernel, *args, **options)

    triton.JITFunction.run = telling


def races(handler: Any, stream: int, kernel: str, arguments: dict[str, Any]) -> list[Any]:
    """Tell torch's event handler what a kernel reads and writes; return the races that it finds."""
    from order.gpu import KERNELS

    roles = KERNELS.get(kernel)
    if roles is None:
        return []
    _launched["told"] += 1
    tensors = {key: one.data_ptr() for key, one in arguments.items() if isinstance(one, torch.Tensor)}
    reads = {pointer for key, pointer in tensors.items() if roles.get(key) == "reads"}
    writes = {pointer for key, pointer in tensors.items() if roles.get(key) in ("writes", "changes")}
    names = {pointer: [key] for key, pointer in tensors.items()}
    found: list[Any] = handler._handle_kernel_launch(stream, reads - writes, writes, set(), kernel, names)
    return found


def _planted_race() -> bool:
    """Write on one stream what another one has just written, with nothing that orders them."""
    from torch.cuda import _sanitizer

    whole = torch.zeros(1000, device=DEVICE)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            whole.mul_(2)
        torch.cuda.synchronize()
    except _sanitizer.CUDASanitizerErrors:
        return True
    return False


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "memory":
        memory(int(*rest))
    elif what == "planted":
        planted()
    else:
        stream_order(*rest)
