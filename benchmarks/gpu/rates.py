"""A part of benchmarks.gpu: the kernels' rates beside a copy, which are numbers of the planner's.

copy                   bytes/s
compress, decompress   elements/s; codes/s of all senders
weights                encode, decode and sums of the exact gather, weights/s
adam                   bytes/s of torch's step
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.gpu.part import DEVICE, attempt, tell
from megatron_patch.config import CompressionConfig
from megatron_patch.weights.code import FACTS, bound
from megatron_patch.weights.gather import coder_of
from megatron_patch.workflows.bench import gpu_rates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SENDERS = (8, 64)
RATIOS = (1.43e-3, 1.43e-2)
"""Learning rates by the weights' standard deviation."""
_ADAM_BYTES = 28
"""A parameter's: gradient, weight and moments are read, the last three written, in fp32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", type=int, default=200_000_000)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    size, runs = args.elements, args.runs
    attempt("copy", copy, size, runs)
    for ratio in RATIOS:
        attempt("weights", weights, size, ratio, runs)
    attempt("adam", adam, size // 8, runs)
    for bits, codec in ((4, "levels"), (2, "levels"), (4, "uniform"), (1, "sign")):
        for dtype in DTYPES:
            attempt(f"{bits} bits, {codec}, {dtype}", gradients, bits, codec, dtype, size, runs)


def seconds_of(call: Any, runs: int) -> float:
    return gpu_rates.seconds_of(lambda _: call(), [torch.empty(0)], DEVICE, runs)


def copy(size: int, runs: int) -> None:
    line = gpu_rates.copy(4 * size, DEVICE, runs)
    tell(rates={"copy_bytes": line.bytes / line.seconds})


def gradients(bits: int, codec: str, dtype: str, size: int, runs: int) -> None:
    of_adam = {"method": "onebit_adam"} if bits == 1 else {"method": "loco", "bits": bits, "codec": codec}
    config = CompressionConfig(**of_adam)
    (line,) = gpu_rates.compress(config, size, DTYPES[dtype], DEVICE, runs, reference=False)
    found = {"compress": size / line.seconds, "compress_bytes": line.bytes / line.seconds}
    for senders in SENDERS:
        shard = max(size // senders // 16 * 16, 16)
        line = gpu_rates.decompress_reduce(config, shard, senders, DTYPES[dtype], DEVICE, runs)
        found[f"decompress of {senders}"] = senders * shard / line.seconds
        found[f"decompress_bytes of {senders}"] = line.bytes / line.seconds
    tell(rates={f"{bits} bits, {codec}, {dtype}": found})


def moved(numel: int, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 weights, as int16, before and after a step of about `ratio` of their deviation."""
    old = (0.02 * torch.randn(numel, device=DEVICE)).bfloat16()
    # Masters lie anywhere in their bf16 number's interval, as after many steps.
    master = old.float() + (torch.rand(numel, device=DEVICE) - 0.5) * (old.float().abs() * 2.0**-8)
    step = 0.02 * ratio * torch.randn(numel, device=DEVICE).clamp(-3, 3)
    return master.bfloat16().view(torch.int16), (master + step).bfloat16().view(torch.int16)


def weights(size: int, ratio: float, runs: int) -> None:
    """Measure the coder on a shard of 8 ranks; 7 of their messages are decoded."""
    coder, n = coder_of(DEVICE), size // 64 * 8
    old, new = moved(n, ratio)
    room = torch.empty(bound(n), dtype=torch.uint8, device=DEVICE)
    facts = torch.zeros(FACTS, dtype=torch.int64, device=DEVICE)
    coded = coder.encode(old, new, False, room, facts)
    messages = torch.zeros(8, -(-coded // 8) * 8, dtype=torch.uint8, device=DEVICE)
    messages[:, :coded] = room[:coded]
    places = torch.tensor([[0, coded]] * 8, device=DEVICE)
    shards, wrong = old.repeat(8, 1), torch.empty(8, dtype=torch.int32, device=DEVICE)
    coder.decode(messages, places, shards, 0, wrong)
    right = not wrong.any() and bool((shards[1:] == new).all()) and torch.equal(shards[0], old)
    tell(checks={f"weights come back, {n} at {ratio:g}": right})
    # Decoding again is as much work, on other weights.
    rates = {
        "bits": 8 * coded / n,
        "encode": n / seconds_of(lambda: coder.encode(old, new, False, room, facts), runs),
        "decode": 7 * n / seconds_of(lambda: coder.decode(messages, places, shards, 0, wrong), runs),
        "sums": 8 * n / seconds_of(lambda: coder.sums(shards), runs),
    }
    tell(rates={f"weights, {ratio:g}": rates})


def adam(n: int, runs: int) -> None:
    parameter = torch.nn.Parameter(torch.randn(n, device=DEVICE))
    parameter.grad = torch.randn(n, device=DEVICE)
    step = torch.optim.AdamW([parameter], lr=1e-4, fused=True).step
    tell(rates={"adam_bytes": _ADAM_BYTES * n / seconds_of(step, runs)})


if __name__ == "__main__":
    main()
