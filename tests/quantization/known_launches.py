"""`launch` beside Triton's own way, compiled for an H100 without one. Run by a test.

Both must come to the driver with the same compiled kernel and the same values, whatever the arguments; and a
kernel that was launched before must not be looked for again.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl
from quantization.backend_agreement import compress_by, sender_of
from quantization.compile_for_gpu import CPU, Driver, codec_of
from triton.compiler import CompiledKernel, LazyDict

from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.triton_kernels import launches
from megatron_patch.weights import triton_kernels as weights
from megatron_patch.weights.code import bound, tiles_of

CALLS = 1000
INTEGERS = (
    0,
    1,
    -1,
    2,
    15,
    16,
    -16,
    17,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    -(1 << 31) - 1,
    1 << 40,
)
came: list[tuple[Any, ...]] = []
"""What came to the driver: the compiled kernel, and what it was called with."""


@triton.jit
def any_kernel(x, y, count, wide: tl.int64, factor, FIRST: tl.constexpr, SECOND: tl.constexpr):
    at = tl.arange(0, 16)
    values = tl.load(x + at, mask=at < count, other=0)
    tl.store(y + at, values * factor + wide + FIRST, mask=at < SECOND)


def note_instead_of_loading(self: CompiledKernel) -> None:
    self._run = lambda *args: came.append((self, *args))


def same_twice(run: Any) -> int:
    """`run()` once by Triton's way and once by the kept kernels; how many launches it makes."""
    del came[:]
    launches._known.clear()
    torch.manual_seed(0)
    run()
    first = list(came)
    del came[:]
    with without_triton():
        run()
    assert first
    assert len(first) == len(came)
    for one, other in zip(first, came, strict=True):
        assert len(one) == len(other)
        assert all(map(same, one, other)), (one, other)
    return len(first)


def same(one: Any, other: Any) -> bool:
    """Tensors that a call allocates are others in the next."""
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    if isinstance(one, LazyDict):  # for profilers
        one, other = one.data, other.data
    return type(one) is type(other) and one == other


class without_triton:
    """Within it a launch in Triton's own way is an error."""

    def __enter__(self) -> None:
        self._run = triton.JITFunction.run
        triton.JITFunction.run = None

    def __exit__(self, *args: object) -> None:
        triton.JITFunction.run = self._run


def random_calls() -> tuple[int, int]:
    """How many calls were compared, and of how many compiled kernels."""
    draw = random.Random(0)
    memory = torch.zeros(64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    compiled = set()
    for _ in range(CALLS):
        dtype = draw.choice((torch.float32, torch.int16))
        x, y = (memory[start : start + 32].view(dtype) for start in (draw.choice((0, 4, 16)), 8))
        numbers = draw.choice(INTEGERS), draw.choice((1, 5, 16)), draw.choice((0.0, 1.0, 2.5))
        options = {"FIRST": draw.choice((0, 1)), "SECOND": 16, "enable_fp_fusion": draw.choice((False, True))}
        grid = draw.choice(((3,), (3, 2), (3, 2, 1)))
        del came[:]
        any_kernel[grid](x, y, *numbers, **options)
        launches.launch(any_kernel, grid, x, y, *numbers, **options)
        wanted, found = came
        assert len(wanted) == len(found)
        differ = [(a, b) for a, b in zip(wanted, found, strict=True) if not (a is b or same(a, b))]
        assert not differ, differ
        compiled.add(wanted[0])
    return CALLS, len(compiled)


def gradients() -> None:
    layout = BlockLayout.of(1 << 14, 4, 4, 128)
    sender = sender_of(layout, CPU, "int8", 0.8)
    sender.codec = codec_of(4, True)
    payload = torch.zeros(layout.shards, layout.payload_bytes, dtype=torch.uint8)
    compress_by(triton_kernels, sender, torch.zeros(layout.numel), payload, None)
    triton_kernels.decompress_reduce(payload, sender.codec, layout.part(0), torch.empty(1 << 12), 4)


def weight_code() -> None:
    n = 10_000
    old, new = torch.zeros(2, n, dtype=torch.int16)
    message = torch.zeros(bound(n), dtype=torch.uint8)
    counts = torch.zeros(4 * tiles_of(n), dtype=torch.int16)
    places = torch.zeros(5 * tiles_of(n) + 1, dtype=torch.int64)
    weights._write_planes(old, new, counts, places, message)
    weights.decode(
        message[None], torch.tensor([[0, len(message)]]), old[None], -1, torch.zeros(1, dtype=torch.int32)
    )
    weights.sums(old)


def main() -> None:
    CompiledKernel._init_handles = note_instead_of_loading
    triton.runtime.driver.set_active(Driver())
    calls, kernels = random_calls()
    print(f"calls={calls} kernels={kernels}")
    print(f"gradients={same_twice(gradients)} weights={same_twice(weight_code)}")
    assert launches._known, "nothing was kept"


if __name__ == "__main__":
    main()
