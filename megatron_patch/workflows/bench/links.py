"""`megatron-loco bench links`: how fast a cluster's collectives are, for `megatron-loco plan --cluster FILE`.

    torchrun --nproc-per-node 8 --nnodes 2 ... --no-python megatron-loco bench links --out links.yaml

Every rank of the job runs it, as it would run a training script. All-to-all, reduce-scatter and all-gather
are timed over growing sizes: over all ranks, over the ranks of each node, and over the ranks of the same
place on all nodes (all such groups at once, as in two hops). Over NCCL where every rank has a GPU of its
own, else over gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_patch.errors import UserError
from megatron_patch.files import output_folder, write_whole

_LEAST, _MOST = 1 << 12, 1 << 26
_RUNS = 5
_SECONDS = 1.0
"""The runs at one size end after this time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco bench links`."""
    parser.add_argument(
        "--out", type=Path, default=Path("links.yaml"), metavar="FILE", help="default links.yaml"
    )
    parser.add_argument(
        "--most",
        type=float,
        default=_MOST / 2**20,
        metavar="MIB",
        help="largest size that a rank sends; default 64",
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl where there are GPUs")


def run(args: argparse.Namespace) -> int:
    """Run the command on every rank, and return the exit status."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(os.environ):
        raise UserError(
            "bench links: it measures between ranks: start it by torchrun, e.g. torchrun --nproc-per-node 8 "
            "--no-python megatron-loco bench links"
        )
    if not 0.01 <= args.most <= 4096:
        raise UserError(f"--most: {args.most:g} is not allowed; it must be 0.01 to 4096 MiB")
    if int(os.environ["WORLD_SIZE"]) == 1:
        raise UserError("bench links: a single rank has no links; start two or more")
    output_folder(args.out.parent)
    import torch
    import torch.distributed as dist

    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            raise UserError(
                "--backend nccl: there are fewer GPUs than ranks on this node; start one a GPU, or take gloo"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        curves = measure(int(os.environ["LOCAL_WORLD_SIZE"]), int(args.most * 2**20))
        if dist.get_rank() == 0:
            write_whole(args.out, text(curves, backend))
            print(table(curves))
            print(f"{args.out}: megatron-loco plan RECIPE --cluster {args.out}")
    finally:
        dist.destroy_process_group()
    return 0


def text(curves: Sequence[dict[str, Any]], backend: str) -> str:
    """Return the text of the file that `plan --cluster` reads."""
    import torch

    local = int(os.environ["LOCAL_WORLD_SIZE"])
    found = {
        "nodes": int(os.environ["WORLD_SIZE"]) // local,
        "gpus_per_node": local,
        "backend": backend,
        "device": torch.cuda.get_device_name() if backend == "nccl" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
    }
    head = (
        "# Written by megatron-loco bench links. seconds: median of the slowest rank; bytes: what one rank "
        "sends\n# to the others of its group. Change nodes and gpus_per_node to plan for others.\n"
    )
    return head + yaml.safe_dump(found | {"links": list(curves)}, sort_keys=False, width=110)


def measure(local: int, most: int) -> list[dict[str, Any]]:
    """Measure the curves, and return the same list on every rank; every rank must call this.

    Args:
        local: the ranks of each node, which are numbered consecutively.
        most: the largest number of bytes that a rank sends.
    """
    import torch.distributed as dist

    found = []
    for scope, group, ranks in _groups(local):
        for name, call in _collectives(group, ranks):
            nbytes = _LEAST
            while nbytes == _LEAST or nbytes <= most:
                seconds = _seconds(call, nbytes)
                sent = _rounded(nbytes, ranks) * (ranks - 1) // ranks
                found.append(
                    {"collective": name, "scope": scope, "ranks": ranks, "bytes": sent, "seconds": seconds}
                )
                nbytes *= 4
    dist.barrier()
    return found


def _groups(local: int) -> Iterator[tuple[str, Any, int]]:
    """Yield (scope, this rank's group, its size); all ranks create all groups."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    nodes = world // local
    yield "all", dist.group.WORLD, world
    if nodes == 1 or local == 1:
        return
    inside = [dist.new_group([node * local + place for place in range(local)]) for node in range(nodes)]
    yield "inside", inside[rank // local], local
    across = [dist.new_group([node * local + place for node in range(nodes)]) for place in range(local)]
    yield "between", across[rank % local], nodes


def _rounded(nbytes: int, ranks: int) -> int:
    return max(1, nbytes // ranks) * ranks


def _collectives(group: Any, ranks: int) -> Iterator[tuple[str, Callable[[int], Callable[[], Any]]]]:
    """Yield each collective's name, with a function that prepares a call for a number of bytes."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def zeros(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(_rounded(nbytes // dtype.itemsize, ranks), dtype=dtype, device=device)

    def all_to_all(nbytes: int) -> Callable[[], Any]:
        whole, other = zeros(nbytes), zeros(nbytes)
        return lambda: dist.all_to_all_single(other, whole, group=group)

    def reduce_scatter(nbytes: int) -> Callable[[], Any]:
        whole = zeros(nbytes, torch.float32)
        shard = whole.new_zeros(whole.numel() // ranks)
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group)

    def all_gather(nbytes: int) -> Callable[[], Any]:
        whole = zeros(nbytes)
        shard = whole.new_zeros(whole.numel() // ranks)
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group)

    yield "all_to_all", all_to_all
    yield "reduce_scatter", reduce_scatter
    yield "all_gather", all_gather


def _seconds(make: Callable[[int], Callable[[], Any]], nbytes: int) -> float:
    """Return the median over runs of the slowest rank's seconds, the same number on every rank."""
    import torch
    import torch.distributed as dist

    call = make(nbytes)
    on_gpu = dist.get_backend() == "nccl"
    device = "cuda" if on_gpu else "cpu"
    found: list[float] = []
    for run_ in range(_RUNS + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if run_:  # The first run connects the peers and is not counted.
            found.append(float(slowest))
        if sum(found) > _SECONDS:
            break
    return statistics.median(found)


def table(curves: Sequence[dict[str, Any]]) -> str:
    """Return the table for the terminal, with the largest size of each curve."""
    lines = [f"{'collective':16}{'scope':10}{'ranks':>6}{'MB sent':>10}{'ms':>10}{'GB/s':>9}"]
    last = {(curve["scope"], curve["collective"]): curve for curve in curves}
    for (scope, name), curve in last.items():
        rate = curve["bytes"] / curve["seconds"] / 1e9
        lines.append(
            f"{name:16}{scope:10}{curve['ranks']:>6}{curve['bytes'] / 1e6:>10.2f}"
            f"{1e3 * curve['seconds']:>10.3f}{rate:>9.3f}"
        )
    return "\n".join(lines)
