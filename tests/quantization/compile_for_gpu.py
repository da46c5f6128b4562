"""Compiles the Triton kernels for an H100 on a machine without a GPU; one line for each. Run by a test.

    compress-fp32-4-aligned instructions=41.6 fused=118 wide=17 registers=95 stack=0 buffers=2 narrow=0

With compute capabilities as arguments it compiles one variant or more of every kernel for each of them:

    90 compress-levels4 registers=128 stack=0

They are called as on a GPU, and all is done but the launch. `instructions` counts those of the longest loop
for one element (of one sender); of kernels that count or sum weights, a tile each, all that there are.
`fused` counts the fused multiply-adds; `wide` the vector loads and stores; `stack` the bytes of a thread's
registers that did not fit; `buffers` how many tiles of the gradient shared memory holds; `narrow` the
addresses with an offset that may pass 32 bits (narrow_offsets.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from quantization.backend_agreement import compress_by, sender_of
from quantization.narrow_offsets import narrow_offsets
from triton.backends.compiler import GPUTarget

from megatron_patch.collectives.sender import decompress as decompress_all
from megatron_patch.megatron.onebit_adam import norm_sketch, sketch_kernel
from megatron_patch.quantization import backends, triton_kernels
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform
from megatron_patch.weights import triton_kernels as weights
from megatron_patch.weights.code import FACTS, bound

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
kernels: list[Any] = []


class Driver:
    """What Triton asks of a driver before it launches: of an H100, or of another `capability`."""

    def __init__(self, capability: int = 90) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps compiled kernels by device.

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def compile_instead_of_launching() -> None:
    run = triton.JITFunction.run

    def compiled(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, warmup=True, **options))

    triton.JITFunction.run = compiled
    triton.runtime.driver.set_active(Driver())
    backends.available = lambda device: triton_kernels


def codec_of(bits: int, levels: bool) -> Codec:
    return Levels(bits, HADAMARD) if levels else Uniform(bits) if bits > 1 else Sign()


def compress(
    dtype: str,
    bits: int,
    shape: tuple[int, int],
    *,
    error: str | None = "int8",
    spans: tuple[Span, ...] | None = None,
    levels: bool = False,
    measures: bool = True,
) -> Any:
    """The kernel that a bucket of `shape` (elements, shards) in blocks of 128 gets; `levels` rotates them."""
    layout = BlockLayout.of(*shape, bits, 128, spans=spans)
    sender = sender_of(layout, CPU, error, 0.8)
    sender.codec = codec_of(bits, levels)
    sender.measures = measures
    payload = torch.empty(layout.shards, layout.payload_bytes, dtype=torch.uint8)
    compress_by(triton_kernels, sender, torch.zeros(layout.numel, dtype=DTYPES[dtype]), payload)
    return kernels.pop()


def decompress_reduce(
    dtype: str,
    bits: int,
    size: int,
    senders: int,
    spans: tuple[Span, ...] | None = None,
    levels: bool = False,
) -> Any:
    layout = BlockLayout.of(size, 1, bits, 128, spans=spans)
    payloads = torch.zeros(senders, layout.payload_bytes, dtype=torch.uint8)
    output = torch.empty(size, dtype=DTYPES[dtype])
    triton_kernels.decompress_reduce(payloads, codec_of(bits, levels), layout, output, senders)
    return kernels.pop()


def decompress(dtype: str, bits: int, shape: tuple[int, int], spans: tuple[Span, ...] | None) -> Any:
    layout = BlockLayout.of(*shape, bits, 128, spans=spans)
    payloads = torch.zeros(layout.shards, layout.payload_bytes, dtype=torch.uint8)
    decompress_all(payloads, codec_of(bits, False), layout, torch.empty(shape[0], dtype=DTYPES[dtype]))
    (kernel,) = kernels  # one launch for all shards
    kernels.clear()
    return kernel


def weight_code(start: int) -> dict[str, Any]:
    """The kernels for weights that begin `start` weights behind an aligned address, by name."""
    n = 10_000
    old, new = (torch.zeros(start + n, dtype=torch.int16)[start:] for _ in range(2))
    message, facts = torch.zeros(bound(n), dtype=torch.uint8), torch.zeros(FACTS, dtype=torch.int64)
    weights.encode(old, new, False, message, facts)
    places = torch.tensor([[0, message.numel()]])
    weights.decode(message[None], places, old[None], -1, torch.zeros(1, dtype=torch.int32))
    found = {kernel.metadata.name.removesuffix("_kernel"): kernel for kernel in kernels}
    kernels.clear()
    return found


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


def instructions_in_all(assembly: str) -> int:
    """But for those that fill the kernel's end."""
    return len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP)", assembly, re.MULTILINE))


def report(
    name: str, kernel: Any, elements: int, count: Callable[[str], int] = instructions_of_the_longest_loop
) -> None:
    """One line; a thread does `elements` in a round of the longest loop, or in all."""
    ptx = kernel.asm["ptx"]
    fused = len(re.findall(r"fma\.rn\.f(?:32|64)", ptx))
    wide = len(re.findall(r"(?:ld|st)\.global\.v[24]|cp\.async\.\w+\.shared\.global [^;]*0x10", ptx))
    counted = count(disassembled(triton.knobs.nvidia.nvdisasm, "-c", kernel=kernel))
    numbers = {"instructions": f"{counted / elements:.1f}", "fused": fused, "wide": wide}
    numbers |= registers_and_stack(kernel)
    buffers = re.findall(r"ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x", kernel.asm["ttgir"])
    numbers |= {"buffers": max(map(int, buffers), default=0), "narrow": _narrow(kernel)}
    print(name, *(f"{key}={value}" for key, value in numbers.items()))


def _narrow(kernel: Any) -> int:
    found = narrow_offsets(kernel.asm["ttir"])
    for line in found:
        print(kernel.metadata.name, line, file=sys.stderr)
    return len(found)


def registers_and_stack(kernel: Any) -> dict[str, str]:
    usage = disassembled(triton.knobs.nvidia.cuobjdump, "-res-usage", kernel=kernel)
    return dict(zip(("registers", "stack"), *re.findall(r"REG:(\d+) STACK:(\d+)", usage), strict=True))


def every_kernel(capability: int) -> None:
    """What training launches: the codecs, the cuts of buckets, statistics or none, the weight code, 1-bit
    Adam's sketch of the norm."""
    triton.runtime.driver.set_active(Driver(capability))
    aligned, odd, rows = (1 << 14, 4), (4 * 4099, 4), (Span.of(0, (100, 160)),)
    found = {
        "compress-levels4": compress("bf16", 4, aligned, levels=True),
        "compress-levels4-rows-unlogged": compress(
            "fp32", 4, aligned, levels=True, spans=rows, measures=False
        ),
        "compress-levels2-odd-fp32-error": compress("fp32", 2, odd, levels=True, error="fp32"),
        "compress-2-fp16": compress("fp16", 2, odd, error=None),
        "compress-1-bf16-error": compress("bf16", 1, aligned, error="bf16"),
        "compress-8": compress("fp32", 8, aligned),
        "decompress-levels4": decompress_reduce("bf16", 4, 1 << 14, 8, levels=True),
        "decompress-levels2-rows": decompress_reduce("fp32", 2, 1 << 14, 8, rows, levels=True),
        "decompress-1": decompress("fp32", 1, odd, None),
    }
    found |= {f"weights-{name}": kernel for name, kernel in weight_code(0).items()}
    sketch = norm_sketch.NormSketch(1, CPU)
    sketch.add(torch.zeros(10_000), 1.0)
    sketch_kernel.fold(norm_sketch.rows_of(sketch._pieces), norm_sketch.signs(CPU), norm_sketch.COLUMNS)
    found["sketch"] = kernels.pop()
    for name, kernel in found.items():
        numbers = registers_and_stack(kernel)
        print(capability, name, *(f"{key}={value}" for key, value in numbers.items()), flush=True)


def main() -> None:
    compile_instead_of_launching()
    if capabilities := [int(argument) for argument in sys.argv[1:]]:
        for capability in capabilities:
            every_kernel(capability)
        return
    aligned, odd = (1 << 16, 4), (4 * 16387, 4)
    for dtype in ("fp32", "bf16"):
        report(f"compress-{dtype}-4-aligned", compress(dtype, 4, aligned), 16)
        report(f"compress-{dtype}-4-odd", compress(dtype, 4, odd), 16)
        # 4 words of 8 codes, of 4 senders in one round.
        report(f"decompress-{dtype}", decompress_reduce(dtype, 4, 1 << 16, 8), 4 * 8 * 4)
    rows = (Span.of(0, (400, 160)),)
    for dtype in ("fp32", "bf16"):
        report(f"compress-{dtype}-4-rows", compress(dtype, 4, aligned, spans=rows), 16)
        report(f"decompress-{dtype}-rows", decompress_reduce(dtype, 4, 1 << 16, 8, rows), 4 * 8 * 4)
    report("compress-fp32-1-aligned", compress("fp32", 1, aligned), 16)
    short = (aligned[0] + 4 * 32, 4)  # a block of 32 at each shard's end
    for bits in (4, 2):
        name = f"levels{bits}"
        report(f"compress-fp32-{name}-aligned", compress("fp32", bits, aligned, levels=True), 16)
        report(f"compress-fp32-{name}-short", compress("fp32", bits, short, levels=True), 16)
        report(f"decompress-fp32-{name}", decompress_reduce("fp32", bits, 1 << 16, 8, levels=True), 4 * 8 * 4)
    report("compress-fp32-levels4-rows", compress("fp32", 4, aligned, spans=rows, levels=True), 16)
    for dtype in ("fp32", "bf16"):  # in steps that are not logged
        for where, spans in (("aligned", None), ("rows", rows)):
            kernel = compress(dtype, 4, aligned, spans=spans, levels=True, measures=False)
            report(f"compress-{dtype}-unlogged4-{where}", kernel, 16)
    part = decompress_reduce("fp32", 4, 1 << 16, 8, rows, levels=True)
    report("decompress-fp32-levels4-rows", part, 4 * 8 * 4)
    for start, where in ((0, "aligned"), (1, "odd")):
        for name, kernel in weight_code(start).items():
            # A thread codes a weight in a round, moves 8 words, or counts 16 weights; others see no weights.
            sees_tiles = name in ("count", "sums")
            elements = 16 if sees_tiles else 8 if name == "pack" else 1
            count = instructions_in_all if sees_tiles else instructions_of_the_longest_loop
            report(f"weights-{name}-{where}", kernel, elements, count)
    # The rest compiles. Sizes of 1 are constants to Triton.
    short_row = (Span.of(7, (3, 50)),)
    for bits in (8, 2, 1):
        rest = [
            decompress_reduce("fp16", bits, 1, 1),
            compress("fp16", bits, (1, 1), error=None),
            compress("fp16", bits, (200, 3), spans=short_row),
            decompress_reduce("fp16", bits, 200, 1, short_row),
        ]
        rest += [decompress("fp16", bits, (200, 3), spans) for spans in (None, short_row)]
        assert sum(map(_narrow, rest)) == 0, "offsets of 32 bits"
    for error in ("bf16", "fp32"):
        assert _narrow(compress("fp32", 4, aligned, error=error)) == 0


if __name__ == "__main__":
    main()
