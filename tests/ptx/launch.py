"""Triton's kernels, compiled for an H100 or another GPU and run by executor.py, in place of launches.

with executed() as ran:
    triton_kernels.compress(...)       # CPU tensors
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from order.gpu import KERNELS
from ptx.executor import Program
from ptx.memory import Global
from quantization.compile_for_gpu import Driver


@dataclass
class Ran:
    """What was run.

    Attributes:
        programs: by name of the kernel, the PTX that was run last.
        change: what is done to a kernel's PTX before it is run.
        by_address: tensors that kernels find by addresses in a table.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    change: Callable[[str], str] = str
    launches: int = 0
    by_address: list[torch.Tensor] = field(default_factory=list)
    _parsed: dict[str, Program] = field(default_factory=dict)

    def run(self, kernel: Any, compiled: Any, arguments: dict[str, Any], grid: Any) -> None:
        """One launch of a compiled kernel."""
        ptx = self.change(compiled.asm["ptx"])
        if ptx not in self._parsed:
            self._parsed[ptx] = Program(ptx, seed=len(self._parsed))
        program = self.programs[kernel.fn.__name__] = self._parsed[ptx]
        memory = Global()
        values: list[Any] = []
        places: dict[int, int] = {}
        roles = KERNELS[kernel.fn.__name__]
        written = {
            argument.untyped_storage()._cdata: roles.get(name) != "writes"
            for name, argument in sorted(arguments.items(), key=lambda item: roles.get(item[0]) == "writes")
            if isinstance(argument, torch.Tensor)
        }
        for name, kind in compiled.src.signature.items():
            if kind == "constexpr":
                continue
            value = arguments[name]
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in places:
                    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                    places[storage._cdata] = memory.put(
                        name, raw, written[storage._cdata], storage.data_ptr() % 16
                    )
                value = places[storage._cdata] + value.data_ptr() - storage.data_ptr()
            values.append(value)
        for tensor in self.by_address:
            memory.put("a tensor of the table", tensor.view(torch.uint8).numpy(), at=tensor.data_ptr())
        values += [0] * (len(program.parameters) - len(values))  # scratch, which none of them has
        program.launch(tuple(grid), values, compiled.metadata.shared, memory)
        self.launches += 1


@contextlib.contextmanager
def executed(capability: int = 90) -> Iterator[Ran]:
    """Within the block Triton's launches are run here, compiled for a GPU of that compute capability."""
    ran = Ran()
    original = triton.JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, grid: Any, **options: Any) -> None:
        compiled = original(self, *args, warmup=True, grid=grid, **options)
        arguments = dict(zip(self.arg_names, args, strict=False)) | options
        ran.run(self, compiled, arguments, grid)

    triton.JITFunction.run = run
    triton.runtime.driver.set_active(Driver(capability))
    try:
        yield ran
    finally:
        triton.JITFunction.run = original
