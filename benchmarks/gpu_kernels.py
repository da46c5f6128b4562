"""How near the GPU kernels come to the speed of a copy on the same device, in the same run.

    python benchmarks/gpu_kernels.py --json gpu_kernels.json          # a few minutes on an H100 or H200

Per gradient dtype: compress at 4 bits (block 128, 8-bit error) by the Triton kernel, by the torch reference
and by torch.compile of it; decompress_reduce of 8 and of 64 senders. Bytes are those that must move (6.55 an
element for compress from fp32); the yardstick is a large copy on the device, read and written bytes counted.
Inputs rotate, so that no cache serves one run with the last one's data. Times are medians of CUDA events.

`--device cpu` with TRITON_INTERPRET=1 and few elements shows that the script runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patch.compensation.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.blocks import BlockLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SENDERS = (8, 64)
ROTATING = 3


def seconds_of(call: Callable[[int], object], device: torch.device, runs: int) -> float:
    """Median seconds of `call(k)`, k counting the runs, after two that warm up."""
    times = []
    for k in range(runs + 2):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(k)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call(k)
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def rows_of(
    name: str, elements: int, device: torch.device, runs: int, compiled: bool
) -> list[dict[str, Any]]:
    """(what, bytes moved, seconds) for gradients of one dtype."""
    dtype, config = DTYPES[name], CompressionConfig(bits=4)
    shards = 8
    layout = BlockLayout.of(elements, shards, config.bits, config.block_size)
    sender = Sender(config, layout, device)
    assert sender.error is not None
    gradients = [torch.randn(elements, device=device).to(dtype) for _ in range(ROTATING)]
    payload = torch.empty(shards, layout.payload_bytes, dtype=torch.uint8, device=device)
    error = sender.error.tensors()
    moved = elements * dtype.itemsize + 2 * sender.error.nbytes + payload.nbytes

    def triton(k: int) -> None:
        gradient = gradients[k % ROTATING]
        triton_kernels.compress(gradient, payload, layout, error, sender.error.beta, None, sender.statistics)

    ways: dict[str, Callable[[int], object]] = {
        f"compress {name}, triton": triton,
        f"compress {name}, torch": lambda k: sender.compress_in_torch(gradients[k % ROTATING], payload, None),
    }
    if compiled:
        reference = torch.compile(sender.compress_in_torch)
        ways[f"compress {name}, torch.compile"] = lambda k: reference(gradients[k % ROTATING], payload, None)
    found = []
    for what, call in ways.items():
        try:
            found.append({"what": what, "bytes": moved, "seconds": seconds_of(call, device, runs)})
        except torch.OutOfMemoryError as failure:  # the reference holds some ten copies of the bucket
            print(f"{what}: {str(failure).splitlines()[0]}", file=sys.stderr)
    for senders in SENDERS:
        shard = BlockLayout.of(elements // senders, 1, config.bits, config.block_size)
        payloads = torch.randint(256, (senders, shard.payload_bytes), dtype=torch.uint8, device=device)
        payloads[:, shard.code_bytes :].view(torch.bfloat16).fill_(0.5)
        output = torch.empty(shard.shard_size, dtype=dtype, device=device)
        seconds = seconds_of(
            lambda k, p=payloads, s=shard, o=output, n=senders: triton_kernels.decompress_reduce(p, s, o, n),
            device,
            runs,
        )
        what = f"decompress_reduce {name}, {senders} senders, triton"
        found.append({"what": what, "bytes": payloads.nbytes + output.nbytes, "seconds": seconds})
    return found


def copy_row(nbytes: int, device: torch.device, runs: int) -> dict[str, Any]:
    """The yardstick: a copy of `nbytes` on the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda _: target.copy_(source), device, runs)
    return {"what": "copy", "bytes": 2 * nbytes, "seconds": seconds}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--elements", type=int, default=1 << 28, help="of the bucket; default 268,435,456")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each line; default 20")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels.py: error: no GPU is there; see --help for --device cpu", file=sys.stderr)
        return 2
    rows = [copy_row(4 * args.elements, device, args.runs)]
    for name in DTYPES:
        rows += rows_of(name, args.elements, device, args.runs, not args.no_compile)
    copy = rows[0]["bytes"] / rows[0]["seconds"]
    for row in rows:
        row["of_copy"] = row["bytes"] / row["seconds"] / copy
        print(
            f"{row['what']:45} {row['bytes'] / 1e9:8.3f} GB {row['seconds'] * 1e3:9.3f} ms "
            f"{row['bytes'] / row['seconds'] / 1e9:8.1f} GB/s {row['of_copy']:6.1%} of copy"
        )
    cuda = device.type == "cuda"
    result = {
        "elements": args.elements,
        "rows": rows,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
