"""Computes from a checkpoint how much of the noise in Adam's steps a code that knew sqrt(v) would save.

    python benchmarks/error_feedback/adam_blocks.py runs/llama_3m/checkpoints/iter_0003000

Adam divides by sqrt(v), but today's codes do not: they spread the rounding error evenly over a block of 128
elements, in proportion to the block's energy. With E[g^2] proportional to v, the noise in the block's step is

    sum(v) * sum(1 / v)             with today's codes
    sum(v / f) * sum(f / v)         if senders divide by sqrt(f), f being v's row means times its column means
    128^2                           if senders divide by sqrt(v) itself

each times the same factor. For each matrix it prints the standard deviation of log sqrt(v) within blocks, as
the mean over blocks, and the share of the noise that is saved, in the median block and in the sum of blocks.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

BLOCK = 128


@dataclass(frozen=True)
class Found:
    """The statistics of a matrix's blocks."""

    spread: float
    """The standard deviation of log sqrt(v) within a block, as the mean over blocks."""
    noise: torch.Tensor
    """The noise with today's codes, with row and column factors, and with v itself; fp64 [3, blocks]."""


def look_at(v: torch.Tensor) -> Found:
    """Analyse the whole blocks in each row of one matrix of Adam's second moments, [R, C]."""
    v = v.double()
    v = v[(v > 0).all(1)]  # Rows without a gradient, as of a token that never occurred, are sent as zeros.
    factors = v.mean(1, keepdim=True) * v.mean(0, keepdim=True) / v.mean()
    width = min(BLOCK, v.shape[1])
    whole = v.shape[1] // width * width
    blocks, f = (one[:, :whole].reshape(-1, width) for one in (v, factors))
    today = blocks.sum(1) * (1 / blocks).sum(1)
    factored = (blocks / f).sum(1) * (f / blocks).sum(1)
    least = torch.full_like(today, width**2)
    spread = float(blocks.sqrt().log().std(1, correction=0).mean())
    return Found(spread, torch.stack([today, factored, least]))


def line(name: str, spread: float, noise: torch.Tensor) -> str:
    """Return a row of the table: the shares of today's noise that would be saved."""
    each, sums = 1 - noise[1:] / noise[0], 1 - noise[1:].sum(1) / noise[0].sum()
    shares = [value for one in zip(each.median(1).values, sums, strict=True) for value in one]
    return f"| {name} | {spread:.2f} | " + " | ".join(f"{share:.0%}" for share in shares) + " |"


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return Adam's second moments of matrices by parameter, from a checkpoint of the distributed optimizer.

    The optimizer's states are whole buckets there. A parameter's place in a bucket is found by its values,
    because the optimizer's fp32 copy of it, rounded, equals the weight.
    """
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in metadata.items()
               if isinstance(m, TensorStorageMetadata)}  # fmt: skip
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    weights = {
        f"{name} {place}": one
        for name, tensor in tensors.items()
        if not name.startswith("optimizer.")
        for place, one in enumerate(tensor.unbind() if ".layers." in name else [tensor])
    }
    found = {}
    for key, v in tensors.items():
        if not key.endswith(".exp_avg_sq"):
            continue
        copies, start = tensors[key.removesuffix("exp_avg_sq") + "param"], 0
        while name := next((n for n, weight in weights.items() if _lies_at(copies, start, weight)), None):
            weight = weights.pop(name)
            if weight.dim() == 2:
                found[name] = v[start : start + weight.numel()].view_as(weight)
            start = -(-(start + weight.numel()) // 64) * 64
    return found


def _lies_at(copies: torch.Tensor, start: int, weight: torch.Tensor) -> bool:
    copy = copies[start : start + weight.numel()]
    return copy.numel() == weight.numel() and torch.equal(copy.to(weight.dtype), weight.flatten())


def main() -> None:
    """Print a line for each matrix."""
    found = moments(Path(sys.argv[1]))
    print("| matrix | log sqrt(v) | saved by factors: median block | in all | by v: median block | in all |")
    print("| --- | --- | --- | --- | --- | --- |")
    looked = {name: look_at(v) for name, v in sorted(found.items())}
    for name, one in looked.items():
        print(line(name, one.spread, one.noise))
    layers = [one for name, one in looked.items() if ".layers." in name]
    together = torch.cat([one.noise for one in layers], 1)
    print(line("all layers", statistics.fmean(one.spread for one in layers), together))


if __name__ == "__main__":
    main()
