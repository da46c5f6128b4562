"""Estimates the norm of the mean of the ranks' gradients, although no rank has this mean.

Clipping needs |mean of g_i|, which the norms of the ranks' own gradients do not give: noise that differs
between ranks counts fully in each |g_i|, but only 1/N in the mean. So every rank folds its gradient into K
numbers,

    S_i[k] = sum over elements j with column(j) = k of sign(j) * g_i[j]          (a count sketch)

with signs and columns that all ranks share. Folding is linear, so the mean of the S_i is the sketch of the
mean gradient. |S|^2 is an unbiased estimate of the squared norm, with a relative standard deviation of
sqrt(2/K): for K of about a thousand, 2.2 % of the norm. It costs one pass over the gradient and an all-reduce
of 4 KiB. NaN and Inf are preserved.

The signs come from one table. Each stretch of a gradient reads them from a place in it that is drawn anew in
every step. K is a prime, so that no column of a weight matrix stays in one column of the sketch.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_patch.quantization import backends

COLUMNS = 1021
"""K, the length of a sketch."""
STRETCH = 256 * COLUMNS
"""A stretch is this many consecutive elements of a gradient, whose signs are consecutive in the table."""
_TABLE = 16 * STRETCH


@dataclass(frozen=True)
class ScaledValues:
    """Consecutive elements of a gradient: `values`, of any float dtype, times `factor`.

    The signs of the k-th stretch begin at index `starts[k]` of the table.
    """

    values: torch.Tensor
    factor: float
    starts: list[int]


class NormSketch:
    """The sketch of a vector that is added piece by piece; all ranks add pieces of the same lengths.

    Args:
        seed: the same on all ranks, and a different one in every step.
        device: the device of the pieces.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._random = random.Random(seed)
        self._device = device
        self._pieces: list[ScaledValues] = []

    def add(self, piece: torch.Tensor, factor: float) -> None:
        """Add the next elements, `factor` times `piece` (any float dtype and shape), which is read later."""
        values = piece.reshape(-1)
        if not values.numel():
            return
        stretches = range(0, values.numel(), STRETCH)
        starts = [self._random.randrange(_TABLE - min(values.numel() - at, STRETCH)) for at in stretches]
        self._pieces.append(ScaledValues(values, factor, starts))

    def squared_norm_of_mean(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Estimate |mean over the group's ranks|^2, fp64 []; all ranks of the group must call this once."""
        values = self._folded()
        dist.all_reduce(values, group=group)
        return (values.double() / group.size()).square().sum()

    def _folded(self) -> torch.Tensor:
        # Triton is imported only if a GPU is used.
        if self._device.type == "cuda" and backends.available(self._device) is not None:
            kernel = importlib.import_module("megatron_patch.megatron.onebit_adam.sketch_kernel")
            folded: torch.Tensor = kernel.fold(rows_of(self._pieces), signs(self._device), COLUMNS)
            return folded
        return fold(self._pieces, signs(self._device))


def try_kernel(device: torch.device) -> None:
    """Fold a few elements if `device` is a GPU; UserError if its kernel cannot be compiled."""
    if device.type != "cuda":
        return
    with backends.explained():
        sketch = NormSketch(0, device)
        for dtype in (torch.float32, torch.bfloat16):
            sketch.add(torch.zeros(16, dtype=dtype, device=device), 1.0)
        sketch._folded()


def fold(pieces: list[ScaledValues], table: torch.Tensor) -> torch.Tensor:
    """Return the sketch of the pieces, fp32 [COLUMNS]; `table` is `signs`."""
    values = torch.zeros(COLUMNS, dtype=torch.float32, device=table.device)
    for part, factor, start in _stretches(pieces):
        signed = part * table[start : start + part.numel()]
        whole = part.numel() // COLUMNS * COLUMNS
        values.add_(signed[:whole].view(-1, COLUMNS).sum(0, dtype=torch.float32), alpha=factor)
        values[: part.numel() - whole].add_(signed[whole:], alpha=factor)
    return values


def rows_of(pieces: list[ScaledValues]) -> dict[torch.dtype, torch.Tensor]:
    """Return the kernel's table of stretches, int64 [stretches, 4], for each dtype of the pieces.

    A row has the address of a stretch, its number of elements, where its signs begin, and its factor's bits.
    """
    rows: dict[torch.dtype, list[torch.Tensor]] = {}
    for piece in pieces:
        at = torch.arange(len(piece.starts), device="cpu") * STRETCH
        row = torch.empty(len(piece.starts), 4, dtype=torch.int64, device="cpu")
        row[:, 0] = piece.values.data_ptr() + at * piece.values.element_size()
        row[:, 1] = (piece.values.numel() - at).clamp(max=STRETCH)
        row[:, 2] = torch.tensor(piece.starts, device="cpu")
        row[:, 3] = torch.tensor(piece.factor, dtype=torch.float32, device="cpu").view(torch.int32)
        rows.setdefault(piece.values.dtype, []).append(row)
    return {dtype: torch.cat(of_dtype) for dtype, of_dtype in rows.items()}


def _stretches(pieces: list[ScaledValues]) -> Iterator[tuple[torch.Tensor, float, int]]:
    for piece in pieces:
        for part, start in zip(piece.values.split(STRETCH), piece.starts, strict=True):
            yield part, piece.factor, start


@functools.cache
def signs(device: torch.device) -> torch.Tensor:
    """Return the table of random signs, +1 and -1, int8 [_TABLE]."""
    generator = torch.Generator("cpu").manual_seed(20_210_202)
    drawn = torch.randint(2, (_TABLE,), generator=generator, dtype=torch.int8, device="cpu")
    return drawn.mul_(2).sub_(1).to(device)
