"""A part of benchmarks.gpu: do the Triton kernels give the reference's bytes on this GPU?

First a bucket with the default methods' settings, beside the CPU kernels; then random cases of every codec
and of the weight code, as many as the time allows, in several processes. It needs the repository's tests.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import DEVICE, ON_GPU, attempt, remains, tell
from benchmarks.gpu.rates import moved

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from quantization.backend_agreement import (
    ROTATIONS,
    check_compress,
    check_decompress,
    check_decompress_reduce,
    random_spans,
    same,
    sender_of,
)
from weights.weight_coders import CODERS, changed, coded_with_facts, told

from megatron_patch.quantization import native, triton_kernels
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform
from megatron_patch.weights import code
from megatron_patch.weights import native as native_weights
from megatron_patch.weights import triton_kernels as triton_weights

CODECS: list[Any] = [
    *(Levels(bits, HADAMARD) for bits in (4, 2)),
    *(Uniform(8), Uniform(4), Uniform(2, HADAMARD), Sign()),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["plain", "plain", "not finite", "huge", "tiny", "ties"]
CODER = "triton-gpu" if ON_GPU else "triton-interpreted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--size", type=int, default=20_000_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of random cases; default: all left")
    parser.add_argument("--seed", type=int, help="run random cases of this seed alone, in this process")
    args = parser.parse_args()
    if args.seed is not None:
        random_cases(args.seed, args.seconds)
        return
    for bits in (4, 2):
        for dtype in DTYPES[:2]:
            attempt("a large bucket", large_bucket, args.size, bits, dtype)
    attempt("a large shard", large_shard, args.size // 4)
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.bits", f"--seconds={args.seconds}", f"--seed={seed}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for seed in range(args.processes)
    ]
    sys.exit(max(abs(worker.wait()) for worker in workers))


def large_bucket(size: int, bits: int, dtype: torch.dtype) -> None:
    """Compare two exchanges of one bucket with the CPU kernels': payload and errors."""
    layout = BlockLayout.of(size, 8, bits, 128)
    stretches = torch.exp(-6 * torch.rand(size // 128 + 1)).repeat_interleave(128)[:size]
    gradient = (torch.randn(size) * stretches).to(dtype)
    sent = []
    for device, backend in ((torch.device("cpu"), native), (DEVICE, triton_kernels)):
        sender = sender_of(layout, device, "int8", 0.8)
        payload = torch.zeros(8, layout.payload_bytes, dtype=torch.uint8, device=device)
        tensors = sender.error.tensors()
        for _ in range(2):
            backend.compress(gradient.to(device), payload, sender.codec, layout, tensors, 0.8, None)
        sent.append([tensor.cpu() for tensor in (payload, *tensors.values())])
    tell(checks={f"{size} elements, {bits} bits, {dtype}: the CPU's bytes": all(map(same, *sent))})


def large_shard(size: int) -> None:
    """Compare the exact gather's message of a shard with the CPU kernels'."""
    old, new = moved(size, 1.43e-3)
    messages = []
    for device, coder in ((torch.device("cpu"), native_weights), (DEVICE, triton_weights)):
        room = torch.empty(code.bound(size), dtype=torch.uint8, device=device)
        facts = torch.zeros(code.FACTS, dtype=torch.int64, device=device)
        length = coder.encode(old.to(device), new.to(device), False, room, facts)
        messages.append((room[:length].cpu().numpy().tobytes(), facts.tolist()))
    tell(checks={f"{size} weights: the CPU's message": messages[0] == messages[1]})


def random_cases(seed: int, seconds: float) -> None:
    """Check cases for as long as there is time, which the last one may take 20 seconds of."""
    draw, cases, told_at, end = random.Random(seed), 0, 0.0, time.monotonic() + seconds
    while remains() > 20 and time.monotonic() < end:
        try:
            one_case(draw)
        except Exception as error:
            traceback.print_exc()
            what = f"random case {cases} of seed {seed}: {type(error).__name__}: {str(error)[:300]}"
            tell(checks={what: False})
            sys.exit(1)
        cases += 1
        if time.monotonic() > told_at + 5:
            told_at = time.monotonic()
            tell(checks={f"random cases of seed {seed}": True}, cases={str(seed): cases})
    tell(checks={f"random cases of seed {seed}": cases > 0}, cases={str(seed): cases})


def one_case(draw: random.Random) -> None:
    codec, seed = draw.choice(CODECS), draw.randrange(10**6)
    if codec.bits > 1 and draw.random() < 0.3:
        codec = type(codec)(codec.bits, draw.choice(ROTATIONS))
    most = 200_000 if ON_GPU else 900
    size = draw.choice([1, 7, 100, 1000, 4096]) if draw.random() < 0.3 else draw.randint(1, most)
    block, shards = draw.choice([128, 128, 64, 1024, 16] if ON_GPU else [128, 64]), draw.randint(1, 9)
    spans = random_spans(size, seed, exact=draw.random() < 0.5) if draw.random() < 0.6 else None
    layout = BlockLayout.of(size, shards, codec.bits, block, spans=spans)
    of = {"dtype": draw.choice(DTYPES), "kind": draw.choice(KINDS), "seed": seed % 1000, "device": DEVICE}
    which, beta = (
        draw.choice(["compress", "compress", "reduce", "decompress", "weights"]),
        draw.choice([0.0, 0.8]),
    )
    if which == "compress":
        error = draw.choice(["int8", "int8", "bf16", "fp32", None])
        check_compress(triton_kernels, codec, layout, error_dtype=error, beta=beta, **of)
    elif which == "reduce":
        senders = draw.randint(1, 9)
        check_decompress_reduce(triton_kernels, codec, layout, senders=senders, average=beta > 0, **of)
    elif which == "decompress":
        check_decompress(triton_kernels, codec, BlockLayout.of(size, shards, codec.bits, block), **of)
    else:
        spread, kind = draw.choice([1, 3, 40, 4000]), draw.choice(["any", "normal", "narrow"])
        check_weights(min(size, most // 3), seed, spread, draw.random(), kind, draw.random() < 0.3)


def check_weights(numel: int, seed: int, spread: int, share: float, kind: str, fp16: bool) -> None:
    old, new = changed(numel, seed, spread, share, kind, fp16)
    mine, theirs = (coded_with_facts(name, old, new, fp16) for name in (CODER, "reference"))
    assert torch.equal(mine[0], theirs[0]), "the message is the reference's"
    assert mine[1] == theirs[1], "its facts are the reference's"
    wrong, back = told(CODER, mine[0], old)
    assert wrong == 0, "it is a message"
    assert torch.equal(back, new), "it decodes to the new weights"


if __name__ == "__main__":
    assert not CODERS[CODER].without, CODERS[CODER].without
    main()
