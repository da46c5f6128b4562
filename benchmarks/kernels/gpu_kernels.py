"""Compares the speed of the GPU kernels with that of a copy on the same device, in the same run.

    python benchmarks/kernels/gpu_kernels.py --json gpu_kernels.json     # a few minutes on an H100 or H200

For each gradient dtype it measures compress at 4 bits (block 128, 8-bit error) by the Triton kernel, by the
torch reference and by torch.compile of it, and decompress_reduce of 8 and of 64 senders. Bytes are those that
must move (6.55 an element for compress from fp32); they are compared with a large copy on the device.
megatron_patch/workflows/bench/gpu_rates.py does the timing.

`--device cpu` with TRITON_INTERPRET=1 and few elements shows that the script runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron_patch.config import CompressionConfig
from megatron_patch.workflows.bench import gpu_rates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SENDERS = (8, 64)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--elements", type=int, default=1 << 28, help="of the bucket; default 268,435,456")
    parser.add_argument("--runs", type=int, default=20, help="timed rounds of each line; default 20")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels.py: error: no GPU is there; see --help for --device cpu", file=sys.stderr)
        return 2
    config = CompressionConfig(method="loco", bits=4)
    copy = gpu_rates.copy(4 * args.elements, device, args.runs)
    lines = [copy]
    for name, dtype in DTYPES.items():
        found = gpu_rates.compress(config, args.elements, dtype, device, args.runs, not args.no_compile)
        shard = args.elements // gpu_rates.SHARDS
        found += [
            gpu_rates.decompress_reduce(config, shard, senders, dtype, device, args.runs)
            for senders in SENDERS
        ]
        lines += [replace(line, what=f"{name} {line.what}") for line in found]
    rows = []
    for line in lines:
        speed = line.bytes / line.seconds
        of_copy = speed / (copy.bytes / copy.seconds)
        rows.append(asdict(line) | {"of_copy": of_copy})
        print(
            f"{line.what:40} {line.bytes / 1e9:8.3f} GB {line.seconds * 1e3:9.3f} ms "
            f"{speed / 1e9:8.1f} GB/s {of_copy:6.1%} of copy"
        )
    result = {"elements": args.elements, "rows": rows, **gpu_rates.machine(device)}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
