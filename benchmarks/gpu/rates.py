"""A part of benchmarks.gpu: the kernels' rates beside a copy, which are numbers of the planner's.

copy                   bytes/s
compress, decompress   elements/s; codes/s of all senders
weights                encode, decode and sums of the exact gather, weights/s
adam                   bytes/s of torch's step

The bytes that are counted are those that a kernel must move: gradient and error are read and error and
payload written, or payloads are read and the shard written. Inputs rotate, so that no call finds its data in
a cache, and several calls are launched in a row, because a launch can take as long as the kernel.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.part import DEVICE, attempt, tell
from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.codec import codec_of
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.weights.code import FACTS, bound
from megatron_patch.weights.gather import coder_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SENDERS = (8, 64)
SHARDS = 8
"""The shards into which `compress` cuts its bucket."""
_ROTATING, _IN_A_ROW = 3, 6
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


def seconds_of(call: Callable[..., object], runs: int, inputs: Sequence[torch.Tensor] = ()) -> float:
    """Return the median seconds of a call with each of `inputs` in turn; a GPU warms up for one round."""
    turns = itertools.cycle([(each,) for each in inputs] or [()])

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_IN_A_ROW):
            call(*next(turns))
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _IN_A_ROW

    def on_cpu() -> float:  # in Triton's interpreter
        began = time.perf_counter()
        call(*next(turns))
        return time.perf_counter() - began

    if DEVICE.type == "cpu":
        return statistics.median(on_cpu() for _ in range(runs))
    on_gpu()
    return statistics.median(on_gpu() for _ in range(runs))


def copy(size: int, runs: int) -> None:
    source = torch.ones(4 * size, dtype=torch.uint8, device=DEVICE)
    tell(rates={"copy_bytes": 2 * source.nbytes / seconds_of(torch.empty_like(source).copy_, runs, [source])})


def gradients(bits: int, codec: str, dtype: str, size: int, runs: int) -> None:
    of_adam = {"method": "onebit_adam"} if bits == 1 else {"method": "loco", "bits": bits, "codec": codec}
    config = CompressionConfig(**of_adam)
    found = compress(config, size, DTYPES[dtype], runs)
    for senders in SENDERS:
        found |= decompress(config, max(size // senders // 16 * 16, 16), senders, DTYPES[dtype], runs)
    tell(rates={f"{bits} bits, {codec}, {dtype}": found})


def compress(config: CompressionConfig, size: int, dtype: torch.dtype, runs: int) -> dict[str, float]:
    layout = BlockLayout.of(size, SHARDS, config.bits, config.block_size)
    sender = Sender(config, layout, DEVICE)
    assert sender.error is not None
    inputs = [torch.randn(size, device=DEVICE).to(dtype) for _ in range(_ROTATING)]
    payload = torch.empty(SHARDS, layout.payload_bytes, dtype=torch.uint8, device=DEVICE)
    # No statistics, as in unlogged steps.
    rest = (payload, sender.codec, layout, sender.error.tensors(), sender.error.beta, None)
    seconds = seconds_of(lambda gradient: triton_kernels.compress(gradient, *rest), runs, inputs)
    moved = inputs[0].nbytes + payload.nbytes + 2 * sender.error.nbytes
    return {"compress": size / seconds, "compress_bytes": moved / seconds}


def decompress(
    config: CompressionConfig, shard: int, senders: int, dtype: torch.dtype, runs: int
) -> dict[str, float]:
    """Measure averaging the payloads of `senders` into a shard of so many elements."""
    layout, codec = BlockLayout.of(shard, 1, config.bits, config.block_size), codec_of(config)
    shape = senders, layout.payload_bytes
    inputs = [torch.randint(256, shape, dtype=torch.uint8, device=DEVICE) for _ in range(_ROTATING)]
    for payloads in inputs:
        payloads[:, layout.code_bytes :].view(torch.bfloat16).fill_(0.5)
    output = torch.empty(shard, dtype=dtype, device=DEVICE)
    seconds = seconds_of(
        lambda payloads: triton_kernels.decompress_reduce(payloads, codec, layout, output, senders),
        runs,
        inputs,
    )
    return {
        f"decompress of {senders}": senders * shard / seconds,
        f"decompress_bytes of {senders}": (inputs[0].nbytes + output.nbytes) / seconds,
    }


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
