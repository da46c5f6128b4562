"""`python -m benchmarks.kernels`: how fast one core compresses, with a copy of memory as the yardstick."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.kernels import cpu_rates
from megatron_patch.config import ROTATIONS, CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.files import output_file, write_whole
from megatron_patch.registry import OWN_CODECS
from megatron_patch.workflows import tables

_SENDERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.kernels`."""
    add = parser.add_argument
    add("--bits", type=int, default=4, help="bits per element; default 4")
    add("--codec", choices=OWN_CODECS, help="default: that of an exchange with these bits")
    add("--rotation", choices=ROTATIONS, help="of blocks; default: that of the codec")
    add("--block-size", default="128", help="elements per scale, or 'shard'; default 128")
    add("--elements", type=int, default=8 << 20, metavar="N", help="elements of the bucket; default 8 M")
    dtypes = ["fp32", "bf16", "fp16"]
    add("--dtype", default="fp32", choices=dtypes, help="of the gradient; default fp32")
    add("--seconds", type=float, default=2.0, help="spent on each line; default 2")
    add("--typical", action="store_true", help="the median call, which steps see, not the best one")
    add("--json", type=Path, metavar="FILE", help="write the numbers here")


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    import torch

    size = int(args.block_size) if args.block_size.isdigit() else args.block_size
    config = CompressionConfig(
        method="loco", bits=args.bits, block_size=size, codec=args.codec, rotation=args.rotation
    )
    if args.elements < cpu_rates.LEAST:
        raise UserError(f"--elements: {args.elements} is too few; it must be {cpu_rates.LEAST} or more")
    if args.json:
        output_file(args.json)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    result = cpu_rates.measure(config, args.elements, dtype, _SENDERS, args.seconds, args.typical)
    asked = {"elements": args.elements, "bits": config.bits, "block_size": size, "dtype": args.dtype}
    result |= asked | {"codec": config.codec, "rotation": config.rotation}
    show(result)
    if args.json:
        write_whole(args.json, json.dumps(result, indent=2) + "\n")
    return 0


_LINES = {
    "encode_weights_per_second": "weights in {}, encode",
    "decode_weights_per_second": "weights in {}, decode",
    "digest_weights_per_second": "digest of weights",
    "form_elements_per_second": "1-bit Adam, momentum and norm",
    "update_elements_per_second": "1-bit Adam, update",
    "adamw_elements_per_second": "torch's AdamW",
}


def show(result: dict[str, Any]) -> None:
    rates, memcpy = result["elements_per_second"], 2 * result["memcpy_bytes_per_second"]
    reduced = result["decompress_reduce_elements_per_second"]
    rows = [
        (name, rate, result["bytes_per_element"], f"{rate / rates['torch_chunked']:.1f} x")
        for name, rate in sorted(rates.items(), key=lambda item: item[1])
        if name != "native"
    ]
    rows.append(("decompress_reduce", reduced, result["decompress_reduce_bytes_per_element"], ""))
    table = tables.terminal(
        ("what", "M elements/s", "GB/s", "of memcpy", "of torch"),
        [
            (
                _what(name),
                f"{rate / 1e6:.0f}",
                f"{rate * size / 1e9:.2f}",
                f"{rate * size / memcpy:.0%}",
                times,
            )
            for name, rate, size, times in rows
        ],
        left=("what",),
    )
    bits = f"{result['weight_code']['bits_per_weight']:.1f} bits a weight"
    for name, rate in (result["weight_code"] | result["onebit_adam"]).items():
        if name in _LINES:
            table.add_row(_LINES[name].format(bits), f"{rate / 1e6:.0f}", "", "", "")
    table.add_row("memcpy (bytes read and written)", "", f"{memcpy / 1e9:.2f}", "100%", "")
    console = Console()
    console.print(
        f"{result['bits']} bits, codec {result['codec']}, rotation {result['rotation']}, "
        f"block {result['block_size']}, {result['dtype']} gradients, "
        f"{result['elements']:,} elements, {result['call']} call; {result['device']}; "
        f"kernels: {result['kernels']}",
        highlight=False,
    )
    console.print(table)
    if uniform := result["uniform_elements_per_second"]:
        console.print("\nIn turns with the uniform code of as many bits, without rotation:")
        own = rates | {"decompress_reduce": reduced}
        compared = [
            (_what(name), f"{own[name] / 1e6:.0f}", f"{rate / 1e6:.0f}", f"{own[name] / rate:.0%}")
            for name, rate in uniform.items()
        ]
        heads = ("what", "M elements/s", "of the uniform code", "ratio")
        console.print(tables.terminal(heads, compared, left=("what",)))


def _what(name: str) -> str:
    reduces = name == "decompress_reduce"
    return f"{name}, {_SENDERS} senders" if reduces else f"compress, {name.replace('_', ' ')}"
