"""`megatron-loco bench`: measures this machine.

`bench network` (network/): training over slow links. `bench kernels`: how fast compression is, with memcpy as
the yardstick: one bucket on one core, compress (read gradient and error; write codes, scales and the new
error) by the native kernel's variants and by the torch reference in pieces that fit the cache, and
decompress_reduce of 8 senders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_patch.config import BITS, SHARD, CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.workflows.network import command as network

_SENDERS = 8
_PIECES = (1 << 14, 1 << 15, 1 << 16, 1 << 17)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco bench`."""
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kernels = kinds.add_parser("kernels", help="compress and decompress_reduce, beside memcpy")
    _add_kernel_arguments(kernels)
    over_links = kinds.add_parser(
        "network",
        help="training over slow links, made of network namespaces (root)",
        description=network.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    network.add_arguments(over_links)


def run(args: argparse.Namespace) -> int:
    """The command line's way in; returns the exit status."""
    return network.run(args) if args.what == "network" else _run_kernels(args)


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, default=4, choices=BITS, help="bits per element; default 4")
    parser.add_argument("--block-size", default="128", help="elements per scale, or 'shard'; default 128")
    parser.add_argument(
        "--elements", type=int, default=8 << 20, metavar="N", help="elements of the bucket; default 8 M"
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="of the gradient; default fp32"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each line; default 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write kernels.json and kernels.png here")


def _run_kernels(args: argparse.Namespace) -> int:
    size = args.block_size if args.block_size == SHARD else _number(args.block_size)
    config = CompressionConfig(bits=args.bits, block_size=size)
    if args.elements < _PIECES[-1]:
        raise UserError(f"--elements: {args.elements} is too few; it must be {_PIECES[-1]} or more")
    result = measure(config, args.elements, args.dtype, args.seconds)
    show(result)
    files = [args.json] if args.json else []
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        files.append(args.out / "kernels.json")
        from megatron_patch.workflows.pictures import draw_kernels

        draw_kernels(args.out / "kernels.png", result)
    for path in files:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def measure(config: CompressionConfig, elements: int, dtype: str, seconds: float) -> dict[str, Any]:
    """Time every way there is, on one core; the numbers that `--json` writes."""
    import torch

    from megatron_patch.compensation.sender import Sender
    from megatron_patch.quantization import kernels, native
    from megatron_patch.quantization.blocks import BlockLayout

    torch.set_num_threads(1)
    device = torch.device("cpu")
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(torch_dtype)
    layout = BlockLayout.of(elements, 1, config.bits, config.block_size)
    payload = torch.empty(_SENDERS, layout.payload_bytes, dtype=torch.uint8)
    sender = Sender(config, layout, device)
    rates: dict[str, float] = {}
    for index, name in enumerate(native.variants()):
        with native.using(index):
            rates[f"native_{name}"] = elements / _best(
                lambda: sender.compress(gradient, payload[:1]), seconds
            )
    with _reference():
        for size in _PIECES:
            piece = Sender(config, BlockLayout.of(size, 1, config.bits, config.block_size), device)
            one = torch.empty(1, piece.layout.payload_bytes, dtype=torch.uint8)
            pieces = [part for part in gradient.split(size) if len(part) == size]

            def chunked(piece: Sender = piece, one: Any = one, pieces: Any = pieces) -> None:
                for part in pieces:
                    piece.compress(part, one)

            rate = len(pieces) * size / _best(chunked, seconds / len(_PIECES))
            rates["torch_chunked"] = max(rate, rates.get("torch_chunked", 0.0))
    if native.variants():
        rates["native"] = rates[f"native_{native.variants()[-1]}"]
    payload[:] = payload[0]
    reduced = torch.empty(layout.shard_size, dtype=torch_dtype)
    decompress = _best(lambda: kernels.decompress_reduce(payload, layout, reduced), seconds)
    source = torch.empty(256 << 20, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(2)
    return {
        "elements_per_second": rates,
        "decompress_reduce_elements_per_second": elements * _SENDERS / decompress,
        "memcpy_bytes_per_second": source.nbytes / _best(lambda: target.copy_(source), seconds),
        # Gradient and error are read; error, codes and scales are written.
        "bytes_per_element": gradient.element_size() + 2 + 4 / layout.block + layout.payload_bytes / elements,
        "elements": elements,
        "bits": config.bits,
        "block_size": config.block_size,
        "dtype": dtype,
        "device": _processor(),
        "kernels": kernels.describe(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


@contextmanager
def _reference() -> Iterator[None]:
    from megatron_patch.quantization.kernels import VARIABLE

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "torch"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _best(call: Callable[[], object], seconds: float) -> float:
    """The least time of one call, in seconds, of as many as fit (3 at least): others only add to it."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() + ", one core"
    return platform.machine() + ", one core"


def show(result: dict[str, Any]) -> None:
    """The table on the terminal."""
    rates, memcpy = result["elements_per_second"], result["memcpy_bytes_per_second"]
    reference = rates["torch_chunked"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "M elements/s", "GB/s", "of memcpy", "of torch"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        if name == "native":
            continue
        traffic = rate * result["bytes_per_element"]
        table.add_row(
            f"compress, {name.replace('_', ' ')}",
            f"{rate / 1e6:.0f}",
            f"{traffic / 1e9:.2f}",
            f"{traffic / (2 * memcpy):.0%}",
            f"{rate / reference:.1f} x",
        )
    reduced = result["decompress_reduce_elements_per_second"]
    traffic = reduced * result["bits"] / 8
    table.add_row(
        f"decompress_reduce, {_SENDERS} senders",
        f"{reduced / 1e6:.0f}",
        f"{traffic / 1e9:.2f}",
        f"{traffic / (2 * memcpy):.0%}",
        "",
    )
    table.add_row("memcpy (bytes read and written)", "", f"{2 * memcpy / 1e9:.2f}", "100%", "")
    console = Console()
    console.print(
        f"{result['bits']} bits, block {result['block_size']}, {result['dtype']} gradients, "
        f"{result['elements']:,} elements; {result['device']}; kernels: {result['kernels']}",
        highlight=False,
    )
    console.print(table)
