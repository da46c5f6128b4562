"""Compiles the Triton kernels for an H100 on a machine without a GPU; one line for each. Run by a test.

    compress-fp32-4-aligned instructions=39.6 fused=118 wide=12 registers=95 stack=0

`instructions` counts those of the longest loop for one element (of one sender); `fused` the fused
multiply-adds; `wide` the vector loads and stores; `stack` the bytes of a thread's registers that did not fit.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_patch.quantization.triton_kernels.compressing import compress_kernel
from megatron_patch.quantization.triton_kernels.reducing import decompress_reduce_kernel

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16"}
THREADS = 128


def compiled(function: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str]) -> Any:
    """The kernel for `types` of its arguments; `aligned` ones are multiples of 16."""
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {name: index for index, name in enumerate(types)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": THREADS // 32, "enable_fp_fusion": False}
    return triton.compile(source, target=HOPPER, options=options)


def disassembled(tool: Any, *options: str, kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [tool.path, *options, binary.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions_of_the_longest_loop(assembly: str) -> int:
    """Between the target of a backward branch and the branch, both included."""
    count, labels, longest = 0, {}, 0
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = count
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            count += 1
            if (target := re.search(r"\bBRA .*?(\.L\w+)", instruction[1])) and target[1] in labels:
                longest = max(longest, count - labels[target[1]])
    return longest


def report(name: str, kernel: Any, elements: int) -> None:
    """One line; a thread does `elements` in a round of the longest loop."""
    ptx = kernel.asm["ptx"]
    fused = len(re.findall(r"fma\.rn\.f(?:32|64)", ptx))
    wide = len(re.findall(r"(?:ld|st)\.global\.v[24]|cp\.async\.\w+\.shared\.global [^;]*0x10", ptx))
    usage = disassembled(triton.knobs.nvidia.cuobjdump, "-res-usage", kernel=kernel)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    loop = instructions_of_the_longest_loop(disassembled(triton.knobs.nvidia.nvdisasm, "-c", kernel=kernel))
    numbers = {"instructions": f"{loop / elements:.1f}", "fused": fused, "wide": wide}
    numbers |= {"registers": registers, "stack": stack}
    print(name, *(f"{key}={value}" for key, value in numbers.items()))


def compress(dtype: str, bits: int, aligned: bool, **sizes: int) -> Any:
    """For blocks of 128; `sizes` are known when it is compiled, as Triton does with those that are 1."""
    pointers = ["gradient", "error", "error_scales", "noise", "words", "bytes_", "scales", "statistics"]
    types = dict(
        zip(pointers, [POINTERS[dtype], "*i8", "*i16", "*fp32", "*i32", "*u8", "*i16", "*fp64"], strict=True),
        **dict.fromkeys(["numel", "shard_size", "blocks", "code_bytes", "payload_bytes"], "i32"),
        **dict.fromkeys(["beta", "rest", "largest", "largest8"], "fp32"),
    )
    constants = {"BITS": bits, "B": 128, "ROWS": 16, "BF16": dtype == "bf16", "ERROR": 1, "ALIGNED": aligned}
    constants |= {"BETA_IS_ZERO": False, "STOCHASTIC": False}
    multiples = [*pointers, "code_bytes", "payload_bytes", *(["numel", "shard_size"] if aligned else [])]
    return compiled(compress_kernel, without(sizes, types), constants | sizes, without(sizes, multiples))


def decompress_reduce(dtype: str, bits: int, **sizes: int) -> Any:
    types = {"words": "*i32", "scales": "*i16", "output": POINTERS[dtype]}
    types |= dict.fromkeys(["length", "blocks", "senders", "code_quads", "payload_quads", "ones"], "i32")
    types["divisor"] = "fp32"
    constants = {"BITS": bits, "B": 128, "LANES": THREADS, "V": 4, "DIVIDE": True, "BF16": dtype == "bf16"}
    multiples = ["words", "scales", "output"]
    return compiled(decompress_reduce_kernel, without(sizes, types), constants | sizes, multiples)


def without(names: dict[str, int], of: Any) -> Any:
    kept = [name for name in of if name not in names]
    return {name: of[name] for name in kept} if isinstance(of, dict) else kept


def main() -> None:
    for dtype in POINTERS:
        for bits, aligned in ((4, True), (4, False), (1, True)):
            name = f"compress-{dtype}-{bits}-{'aligned' if aligned else 'odd'}"
            report(name, compress(dtype, bits, aligned), 16)
        # 4 words of 8 codes, of 4 senders in one round.
        report(f"decompress-{dtype}", decompress_reduce(dtype, 4), 4 * 8 * 4)
    compress("fp32", 4, False, **dict.fromkeys(["numel", "shard_size", "blocks"], 1))
    decompress_reduce("fp32", 4, **dict.fromkeys(["length", "blocks", "senders", "code_quads"], 1))


if __name__ == "__main__":
    main()
