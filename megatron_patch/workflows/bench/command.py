"""`megatron-loco bench`: measures this machine.

`bench kernels`: how fast compression is on a GPU (gpu_rates.py) or on one core (cpu_rates.py), with a copy of
memory as the yardstick.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_patch.config import ROTATIONS, CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.files import output_folder, write_whole
from megatron_patch.registry import OWN_CODECS
from megatron_patch.workflows import plots, tables

_SENDERS = 8
_ON_CPU, _ON_GPU = 8 << 20, 256 << 20
"""The default numbers of elements."""
_RUNS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco bench`."""
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kernels = kinds.add_parser("kernels", help="compress and decompress_reduce, beside memcpy")
    _add_kernel_arguments(kernels)


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: a GPU where one is"
    )
    parser.add_argument("--bits", type=int, default=4, help="bits per element; default 4")
    parser.add_argument("--codec", choices=OWN_CODECS, help="default: that of an exchange with these bits")
    parser.add_argument("--rotation", choices=ROTATIONS, help="of blocks; default: that of the codec")
    parser.add_argument("--block-size", default="128", help="elements per scale, or 'shard'; default 128")
    parser.add_argument(
        "--elements", type=int, metavar="N", help="elements of the bucket; default 8 M, on a GPU 256 M"
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="of the gradient; default fp32"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help=f"spent on each line; default 2. On a GPU {_RUNS} runs"
    )
    parser.add_argument(
        "--typical",
        action="store_true",
        help="the median call, which steps see, not the best one; on a GPU it is always the median",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write kernels.json and kernels.png here")


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    size = int(args.block_size) if args.block_size.isdigit() else args.block_size
    config = CompressionConfig(
        method="loco", bits=args.bits, block_size=size, codec=args.codec, rotation=args.rotation
    )
    if args.out:
        output_folder(args.out)
    if args.json:
        output_folder(args.json.parent, "--json")
    result = measure(config, args.dtype, args.device, args.elements, args.seconds, args.typical)
    show(result)
    files = [args.json] if args.json else []
    if args.out:
        files.append(args.out / "kernels.json")
        plots.draw_kernels(args.out / "kernels.png", result)
    for path in files:
        write_whole(path, json.dumps(result, indent=2) + "\n")
    return 0


def measure(
    config: CompressionConfig,
    dtype: str,
    device: str,
    elements: int | None,
    seconds: float,
    typical: bool = False,
) -> dict[str, Any]:
    """Measure on the GPU or on one core, and return the numbers that `--json` writes."""
    import torch

    from megatron_patch.workflows.bench import cpu_rates, gpu_rates

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is there; leave it out, and a CPU core is measured")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if elements is None:
        elements = _ON_GPU if on_gpu else _ON_CPU
    if elements < cpu_rates.LEAST:
        raise UserError(f"--elements: {elements} is too few; it must be {cpu_rates.LEAST} or more")
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    if on_gpu:
        measured = gpu_rates.measure(config, elements, torch_dtype, _SENDERS, _RUNS, torch.device("cuda"))
    else:
        measured = cpu_rates.measure(config, elements, torch_dtype, _SENDERS, seconds, typical)
    asked = {"elements": elements, "bits": config.bits, "block_size": config.block_size, "dtype": dtype}
    return measured | asked | {"codec": config.codec, "rotation": config.rotation}


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
    reference = rates.get("torch_chunked") or rates.get("torch", 0.0)
    reduced = result["decompress_reduce_elements_per_second"]
    rows = [
        (name, rate, result["bytes_per_element"], f"{rate / reference:.1f} x" if reference else "")
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
    rows_of_one: dict[str, float] = {}
    if weights := result.get("weight_code"):
        what = f"{weights['bits_per_weight']:.1f} bits a weight"
        rows_of_one |= {_LINES[name].format(what): rate for name, rate in weights.items() if name in _LINES}
    rows_of_one |= {_LINES[name]: rate for name, rate in result.get("onebit_adam", {}).items()}
    for what, rate in rows_of_one.items():
        table.add_row(what, f"{rate / 1e6:.0f}", "", "", "")
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
    if uniform := result.get("uniform_elements_per_second"):
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
