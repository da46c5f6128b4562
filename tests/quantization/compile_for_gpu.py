"""Compiles the Triton kernels for an H100 on a machine without a GPU; one line for each. Run by a test.

    compress-fp32-4-aligned fused=0 wide=8 registers=128 stack=0

`fused` counts fused multiply-adds (they would round differently from the reference), `wide` the vector loads
and stores, `stack` the bytes of a thread's registers that did not fit.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_patch.quantization import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16"}


def compiled(function: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str]) -> Any:
    """The kernel for `types` of its arguments; `aligned` ones are multiples of 16."""
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {name: index for index, name in enumerate(types)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "enable_fp_fusion": False})


def report(name: str, kernel: Any) -> None:
    ptx = kernel.asm["ptx"]
    fused = len(re.findall(r"fma\.rn\.f(?:32|64)", ptx))
    wide = len(re.findall(r"(?:ld|st)\.global\.v[24]", ptx))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    print(name, f"fused={fused}", f"wide={wide}", f"registers={registers}", f"stack={stack}")


def main() -> None:
    pointers = ["gradient", "error", "error_scales", "noise", "payload", "payload16", "partials"]
    sizes = ["shard_size", "blocks", "shards", "code_bytes", "payload_bytes"]
    for dtype, pointer in POINTERS.items():
        for bits, whole in ((4, True), (4, False), (1, True)):
            types = dict(
                zip(pointers, [pointer, "*i8", "*i16", "*fp32", "*u8", "*i16", "*fp64"], strict=True),
                numel="i64",
                **dict.fromkeys(sizes, "i32"),
                **dict.fromkeys(["beta", "rest", "limit", "largest", "largest8"], "fp32"),
            )
            constants = {
                "BITS": bits,
                "B": 128,
                "ROWS": 16 if whole else 8,
                "BF16": dtype == "bf16",
                "ERROR": 1,
                "ALIGNED": whole,
            }
            constants |= {"BETA_IS_ZERO": False, "STOCHASTIC": False}
            aligned = [*pointers, "code_bytes", "payload_bytes", *(["numel", "shard_size"] if whole else [])]
            kernel = compiled(triton_kernels._compress, types, constants, aligned)
            report(f"compress-{dtype}-{bits}-{'aligned' if whole else 'odd'}", kernel)
        types = {"payloads": "*u8", "payloads16": "*i16", "output": pointer}
        types |= dict.fromkeys(["length", "blocks", "senders", "code_bytes", "payload_bytes"], "i32")
        types["divisor"] = "fp32"
        constants = {"BITS": 4, "B": 128, "ROWS": 16, "DIVIDE": True, "BF16": dtype == "bf16"}
        aligned = ["payloads", "payloads16", "output", "code_bytes", "payload_bytes"]
        report(f"decompress-{dtype}", compiled(triton_kernels._decompress_reduce, types, constants, aligned))


if __name__ == "__main__":
    main()
