"""Launches without Triton's search for the compiled kernel, which takes 15 to 20 us of the host each time.

`kernel[grid](...)` binds the arguments, asks what is special about each of them, looks for what was compiled
for that, and compares global constants with those that it was compiled with. But a training step launches the
same kernels for the same buckets again and again. So the compiled kernel is kept here, by all that Triton
compiles for. What is not here yet takes Triton's way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

_SERVED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3) and torch.version.hip is None
"""Since Triton 3.3 a compiled kernel is called with the constants, too. On AMD's GPUs it depends on more than
`_kind` tells."""
_known: dict[tuple[object, ...], tuple[CompiledKernel, tuple[object, ...]]] = {}
"""Compiled kernels, and the values of the parameters that follow the arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """`kernel[grid](*arguments, **options)` on the current stream of the GPU that is current.

    `arguments` are tensors (the first one is), integers and floats; the `tl.constexpr` parameters, which
    follow them, are named in `options`, beside the compiler's options. Returns the compiled kernel; None
    where nothing is compiled, as in Triton's interpreter.
    """
    kinds = [
        (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, torch.Tensor) else _kind(value)
        for value in arguments
    ]
    key = (id(kernel), arguments[0].device, *kinds, *options.items())
    if key in _known:
        compiled, constants = _known[key]
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
        return compiled
    compiled = kernel[grid](*arguments, **options)
    if _SERVED and isinstance(compiled, CompiledKernel):
        _known[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(arguments) :])
    return compiled


@functools.lru_cache(maxsize=1 << 12, typed=True)
def _kind(number: int | float) -> object:
    """What Triton looks at in a number that is no constant."""
    if isinstance(number, int):
        return number == 1, number % 16 == 0, -(1 << 31) <= number < 1 << 31
    return float
