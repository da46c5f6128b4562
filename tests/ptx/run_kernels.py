"""Runs the compiled kernels on random small shapes against the reference, and mutants of them. Run by a test.

    run_kernels.py rounds 1 90   compress rounds=7 launches=21
    run_kernels.py mutants       levels, bar.sync mutants=16 survived=0
    run_kernels.py budgets       levels float32 instructions=5080 cycles=828 shuffles=248 sectors=698

A mutant is a kernel with one barrier, or one wait for cp.async, missing; it must be found.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable

import torch
from ptx.launch import Ran, executed
from ptx.memory import Fault
from quantization import compile_for_gpu
from quantization.backend_agreement import (
    ROTATIONS,
    check_compress,
    check_decompress,
    check_decompress_reduce,
    compress_by,
    even_spans,
    random_spans,
    sender_of,
)
from quantization.narrow_offsets import narrow_offsets

from megatron_patch.megatron.onebit_adam import norm_sketch, sketch_kernel
from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform
from megatron_patch.weights import code
from megatron_patch.weights import triton_kernels as weights

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["plain", "not finite", "huge", "tiny", "ties"]


def codec_of(draw: random.Random, bits: int) -> Codec:
    rotation = draw.choice(ROTATIONS)
    if bits == 1:
        return Sign(1, rotation)
    return Uniform(bits, rotation) if bits == 8 or draw.random() < 0.4 else Levels(bits, rotation)


def layout_of(draw: random.Random, bits: int) -> BlockLayout:
    """Up to some tiles, in all kinds of cuts: aligned, odd, and with blocks that begin anywhere."""
    shards, block = draw.choice([1, 2, 3]), draw.choice([16, 32, 64, 128, 128, 256, 512, 1024])
    kind = draw.choice(["aligned", "odd", "rows", "even rows"])
    even = kind in ("aligned", "even rows")
    numel = 16 * shards * draw.randint(1, 200) if even else draw.randint(1, 5000)
    spans = random_spans(numel, draw.randint(0, 999), exact=draw.random() < 0.5) if kind == "rows" else None
    if kind == "even rows":
        spans = even_spans(numel, draw.randint(0, 999))
    return BlockLayout.of(numel, shards, bits, block, spans=spans)


def a_compression(draw: random.Random, bits: int) -> None:
    check_compress(
        triton_kernels,
        codec_of(draw, bits),
        layout_of(draw, bits),
        dtype=draw.choice(DTYPES),
        error_dtype=draw.choice(["int8", "int8", "bf16", "fp32", None]),
        beta=draw.choice([0.0, 0.8]),
        kind=draw.choice(KINDS),
        seed=draw.randint(0, 999),
        device=CPU,
    )


def a_sum(draw: random.Random, bits: int) -> None:
    check_decompress_reduce(
        triton_kernels,
        codec_of(draw, bits),
        layout_of(draw, bits),
        senders=draw.randint(1, 9),
        dtype=draw.choice(DTYPES),
        average=draw.random() < 0.5,
        kind=draw.choice(KINDS),
        seed=draw.randint(0, 999),
        device=CPU,
    )


def a_tiny_average(draw: random.Random, bits: int) -> None:
    """Subnormal sums, and quotients that round to subnormal numbers."""
    layout = BlockLayout.of(draw.randint(1, 2000), 1, bits, 128)
    options = {"dtype": torch.float32, "average": True, "kind": "tiny", "device": CPU}
    codec, seed = codec_of(draw, bits), draw.randint(0, 999)
    check_decompress_reduce(
        triton_kernels, codec, layout, senders=draw.choice([3, 6, 7]), seed=seed, **options
    )


def a_gather(draw: random.Random, bits: int) -> None:
    check_decompress(
        triton_kernels,
        codec_of(draw, bits),
        layout_of(draw, bits),
        dtype=draw.choice(DTYPES),
        kind=draw.choice(KINDS),
        seed=draw.randint(0, 999),
        device=CPU,
    )


def a_weight_code(draw: random.Random, _: int) -> None:
    """Old and new weights there and back, and the reference's bytes."""
    n = draw.choice([draw.randint(1, 300), draw.randint(300, 1500), 4500])
    start, fp16, generator = draw.choice([0, 1]), draw.random() < 0.3, torch.Generator()
    generator.manual_seed(draw.randint(0, 999))
    far = draw.choice([1, 30, 600, 30000])
    old = 0.02 * torch.randn(start + n, generator=generator)
    old = old.to(torch.float16 if fp16 else torch.bfloat16).view(torch.int16)[start:]
    moved = torch.randint(-far, far + 1, (n,), dtype=torch.int16, generator=generator)
    moved[torch.rand(n, generator=generator) < draw.choice([0.0, 0.5, 0.95])] = 0
    new = torch.empty(start + n, dtype=torch.int16)[start:].copy_(old + moved)
    sent, wanted = (torch.zeros(code.bound(n), dtype=torch.uint8) for _ in range(2))
    told, facts = (torch.zeros(code.FACTS, dtype=torch.int64) for _ in range(2))
    size = weights.encode(old, new, fp16, sent, told)
    assert size == code.encode(old, new, fp16, wanted, facts)
    assert torch.equal(sent[:size], wanted[:size])
    assert torch.equal(told, facts)
    found = torch.full((1,), 7, dtype=torch.int32)
    weights.decode(sent[None], torch.tensor([[0, size]]), old[None], -1, found)
    assert torch.equal(old, new)
    assert int(found) == 0
    assert torch.equal(weights.sums(new), code.sums(new))


def a_step_of_onebit_adam(draw: random.Random, _: int, ran: Ran) -> None:
    generator = torch.Generator().manual_seed(draw.randint(0, 999))
    table, sketch = norm_sketch.signs(CPU), norm_sketch.NormSketch(draw.randint(0, 999), CPU)
    for _ in range(2):
        values = torch.randn(draw.randint(1, 6000), generator=generator).to(draw.choice(DTYPES))
        sketch.add(values, draw.choice([1.0, 0.25]))
    ran.by_address = [piece.values for piece in sketch._pieces]
    expected = norm_sketch.fold(sketch._pieces, table)
    found = sketch_kernel.fold(norm_sketch.rows_of(sketch._pieces), table, norm_sketch.COLUMNS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    ran.by_address = []


ROUNDS: dict[str, tuple[Callable[[random.Random, int], None], list[int]]] = {
    "compress": (a_compression, [4, 2, 4, 2, 8, 1]),
    "decompress_reduce": (a_sum, [4, 2, 8, 1]),
    "tiny averages": (a_tiny_average, [4, 8]),
    "decompress": (a_gather, [4, 2]),
    "weight code": (a_weight_code, [16, 16]),
    "1-bit Adam": (a_step_of_onebit_adam, [1]),
}


def without(ptx: str, line: int) -> str:
    lines = ptx.splitlines()
    return "\n".join([*lines[:line], *lines[line + 1 :]])


def lines_with(ptx: str, pattern: str) -> list[int]:
    """Those before the last use of shared memory: what a loop's end waits for may not be used any more."""
    lines = ptx.splitlines()
    last = max(number for number, line in enumerate(lines) if ".shared" in line)
    return [number for number, line in enumerate(lines[:last]) if pattern in line]


def mutants(ran: Ran, what: Callable[[], None], pattern: str) -> tuple[int, list[int]]:
    """How many lines with `pattern` the kernels of `what` have, and which of them are not missed."""
    ptx: list[str] = []

    def note(text: str) -> str:
        ptx.append(text)
        return text

    ran.change = note
    what()
    places = [(kernel, line) for kernel in dict.fromkeys(ptx) for line in lines_with(kernel, pattern)]
    survived = []
    for kernel, line in places:
        ran.change = lambda text, kernel=kernel, line=line: without(text, line) if text == kernel else text
        try:
            what()
            survived.append(line)
        except (Fault, AssertionError):
            pass
    ran.change = str
    return len(places), survived


def one_compression(codec: Codec, dtype: torch.dtype, tiles: int = 6) -> None:
    layout = BlockLayout.of(tiles * 2048, 1, codec.bits, 128)
    options = {"beta": 0.8, "kind": "plain", "seed": 1, "device": CPU}
    check_compress(triton_kernels, codec, layout, dtype=dtype, error_dtype="int8", **options)


def budget(ran: Ran, codec: Codec, dtype: torch.dtype) -> dict[str, float]:
    """What one more tile of 2,048 elements costs compress: of PTX, for a multiprocessor."""
    counts = []
    for tiles in (4, 6):
        layout = BlockLayout.of(tiles * 2048, 1, codec.bits, 128)
        sender = sender_of(layout, CPU, "int8", 0.8)
        sender.codec = codec
        payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
        if program := ran.programs.get("compress_kernel"):
            program.counts.clear()
        compress_by(triton_kernels, sender, torch.randn(layout.numel).to(dtype), payload)
        program = ran.programs["compress_kernel"]
        counts.append(Counter(program.counts))
        program.counts.clear()
    return {key: (counts[1][key] - counts[0][key]) / 2 for key in counts[1]}


def beyond_2_31(codec: Codec, shape: tuple[int, int]) -> int:
    """Addresses whose offsets that many elements, in so many shards, overflow: 32 bits."""
    compile_for_gpu.kernels.clear()
    meta = torch.device("meta")
    layout = BlockLayout.of(*shape, codec.bits, 128)
    sender = sender_of(layout, meta, "int8", 0.8)
    sender.codec = codec
    payload = torch.empty(layout.shards, layout.payload_bytes, dtype=torch.uint8, device=meta)
    compress_by(triton_kernels, sender, torch.empty(layout.numel, device=meta), payload)
    part = layout.part(0)
    payloads = torch.empty(8, part.payload_bytes, dtype=torch.uint8, device=meta)
    triton_kernels.decompress_reduce(payloads, codec, part, torch.empty(part.numel, device=meta), 8)
    triton_kernels.decompress(payload, codec, layout, torch.empty(layout.numel, device=meta))
    assert len(compile_for_gpu.kernels) == 3
    return sum(len(narrow_offsets(kernel.asm["ttir"])) for kernel in compile_for_gpu.kernels)


def run_rounds(rounds: int, capability: int) -> None:
    seed = int(os.environ.get("MEGATRON_LOCO_TEST_SEED", "0"))
    with executed(capability) as ran:
        for name, (check, choices) in ROUNDS.items():
            draw, before = random.Random(f"{seed} {name}"), ran.launches
            if name == "1-bit Adam":
                check = functools.partial(check, ran=ran)
            for number in range(rounds * len(choices)):
                check(draw, choices[number % len(choices)])
            print(f"{name} rounds={rounds * len(choices)} launches={ran.launches - before}", flush=True)


def run_mutants() -> None:
    with executed() as ran:
        for codec, dtype in ((Levels(4, HADAMARD), torch.float32), (Uniform(2), torch.bfloat16)):
            for pattern in ("bar.sync", "cp.async.wait_group"):
                found, survived = mutants(
                    ran, lambda codec=codec, dtype=dtype: one_compression(codec, dtype), pattern
                )
                print(f"{codec.name}, {pattern} mutants={found} survived={len(survived)}", flush=True)


def run_budgets() -> None:
    with executed() as ran:
        for codec in (Levels(4, HADAMARD), Uniform(4)):
            for dtype in (torch.float32, torch.bfloat16):
                costs = budget(ran, codec, dtype)
                numbers = " ".join(f"{key}={costs[key]:.0f}" for key in ("instructions", *_PIPES))
                print(f"{codec.name} {str(dtype).removeprefix('torch.')} {numbers}")
    compile_for_gpu.compile_instead_of_launching()
    for shape in ((1 << 33, 8), (1 << 33, 1 << 10), ((1 << 33) + 8 * 77, 8)):
        for codec in (Levels(4, HADAMARD), Uniform(8)):
            print(f"{shape[0]} elements, {shape[1]} shards narrow={beyond_2_31(codec, shape)}")


_PIPES = ("cycles", "shuffles", "sectors")

if __name__ == "__main__":
    {"rounds": lambda: run_rounds(*map(int, sys.argv[2:])), "mutants": run_mutants, "budgets": run_budgets}[
        sys.argv[1]
    ]()
