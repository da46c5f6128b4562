"""An independent simulation of the numbers in docs/numerics.md, as an oracle for tests.

The idea of one step, for N ranks that each hold a gradient of B elements:

    for every sender n, shard j (S = B/N elements) and block (b elements, never across a shard):
        h  = g + e                       what the sender wants to say, in fp32
        s  = max|h| / L, rounded up      one bf16 scale per block; mean|h| for 1 bit
        q  = round(h / s)                the code that travels, in [-L, L]
        e <- beta*e + (1-beta)*(h - s*q) what was lost, kept in 8 bits
    for every shard j, at its owner: g_j = sum over n of s_n*q_n

Where N does not divide B, S = ceil(B/N) and the last shards are short or empty. Where blocks follow the
parameters, they are counted from each one's beginning instead (block_labels).

It is written from the text alone, imports nothing of the project, and is meant to be read beside the text:
plain arrays of blocks, [ranks, blocks, b] for each length b that there is. What the text defines as an fp32
or bf16 value is rounded exactly there (NumPy float32 arithmetic, bf16 by its bits), so that a correct
implementation gives the same bits; sums that the text leaves to the implementation (the mean for 1 bit) are
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from simulation.codes import Code, bf16_nearest, rotate, rotate_back, round_to_gradient_dtype

# Labels of elements that are in no block: padding, and what is sent as it is.
PADDING, EXACT = -1, -2
ERRORS = Code("uniform", 8)


# --- where blocks begin and end --------------------------------------------------------------------------


def block_labels(
    numel: int, parameters: list[tuple[int, tuple[int, ...]]], block_size: int, exact: bool = True
) -> np.ndarray:
    """Which block each element of a bucket is in before shards cut it, int [numel]; PADDING, EXACT: none.

    `parameters` are (first element, shape). Blocks are counted from the beginning of every row of every
    parameter; a parameter whose rows have less than 16 elements is a single row. A vector is sent as it is;
    or it is a single row, where not `exact`.
    """
    labels = np.full(numel, PADDING)
    label = 0
    for first, shape in parameters:
        size = math.prod(shape)
        if len(shape) < 2 and exact:
            labels[first : first + size] = EXACT
            continue
        row = math.prod(shape[1:]) if len(shape) > 1 else size
        row = max(size, 1) if row < 16 else row
        for row_start in range(first, first + size, row):
            for start in range(row_start, row_start + row, block_size):
                labels[start : min(start + block_size, row_start + row)] = label
                label += 1
    return labels


def runs(labels: np.ndarray, start: int, stop: int) -> list[slice]:
    """The stretches of one label from `start` to before `stop`, without those in no block."""
    found = []
    while start < stop:
        end = start + 1
        while end < stop and labels[end] == labels[start]:
            end += 1
        if labels[start] >= 0:
            found.append(slice(start, end))
        start = end
    return found


# --- what a sender remembers -----------------------------------------------------------------------------


class _Memory:
    """The errors of blocks on all ranks, [ranks, blocks, b]: int8 codes with bf16 scales, or bf16 or fp32."""

    def __init__(self, shape: tuple[int, int, int], dtype: str):
        self.shape = shape
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        self.values = np.zeros(self.shape, dtype=np.float32)
        self.codes = np.zeros(self.shape, dtype=np.int16)
        self.scale = np.zeros(self.shape[:2], dtype=np.float32)

    def read(self) -> np.ndarray:
        if self.dtype == "int8":
            return self.scale[..., None] * self.codes.astype(np.float32)
        return self.values

    def write(self, target: np.ndarray, sent: np.ndarray) -> None:
        """Remember `target` of the blocks that were `sent`, bool [ranks, blocks]."""
        target = np.where(sent[..., None], target, np.float32(0))
        if self.dtype == "int8":
            scale = ERRORS.scale(target)
            self.codes = np.where(sent[..., None], ERRORS.codes(target, scale), self.codes)
            self.scale = np.where(sent, scale, self.scale)
        else:
            stored = bf16_nearest(target) if self.dtype == "bf16" else target
            self.values = np.where(sent[..., None], stored, self.values)

    def rescale(self, factor: float) -> None:
        """e <- factor * e; a power of two, as loss scales are, loses nothing."""
        self.scale = bf16_nearest(self.scale * np.float32(factor))
        self.values = self.values * np.float32(factor)


# --- all ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """What one step sent, remembered and reduced. Where blocks are rotated, what was sent and is remembered
    is of rotated numbers; 0 where nothing is coded."""

    codes: np.ndarray  # int16 [ranks, numel], q
    scales: np.ndarray  # float32 [ranks, shards, blocks], every value a bf16
    sent: np.ndarray  # float64 [ranks, numel], s*q
    errors: np.ndarray  # float64 [ranks, numel], decode(e) after the step (and after a reset)
    shards: np.ndarray  # float32 [ranks, S], what each owner gives its optimizer; zeros after a short one


class LoCoSimulation:
    """All ranks of a data-parallel group and one bucket, stepped together.

    `gradients` are rounded to `gradient_dtype` on entry, as a bucket of that dtype would hold them, and
    what the owners reduce to `reduced_dtype` (the same unless given). `labels` says which block each
    element is in (block_labels); without, blocks are counted from each shard's beginning. `memory=False` is
    quantization alone: the error is always zero. `codec` and `rotation` are a configuration's, `None` its
    defaults; `first` and `last` say whether this is the first and the last of the hops between which sums
    stay rotated. `step` is `exchange`, then `end_step` for a step that the optimizer did not skip.
    """

    def __init__(
        self,
        ranks: int,
        numel: int,
        *,
        bits: int,
        block_size: int | str = 128,
        beta: float = 0.8,
        error_dtype: str = "int8",
        reset_interval: int = 512,
        memory: bool = True,
        average: bool = False,
        gradient_dtype: str = "fp32",
        reduced_dtype: str | None = None,
        labels: np.ndarray | None = None,
        codec: str | None = None,
        rotation: str | None = None,
        first: bool = True,
        last: bool = True,
    ):
        if bits not in (8, 4, 2, 1):
            raise ValueError(f"bits {bits!r}: one of 8, 4, 2, 1")
        if codec is None:
            codec = {8: "uniform", 1: "sign"}.get(bits, "uniform" if block_size == "shard" else "levels")
        self.code = Code(codec, bits)
        self.rotated_blocks = (rotation or ("hadamard" if codec == "levels" else "none")) == "hadamard"
        self.first, self.last = first, last
        if error_dtype not in ("int8", "bf16", "fp32"):
            raise ValueError(f"error dtype {error_dtype!r}: one of int8, bf16, fp32")
        reduced_dtype = reduced_dtype or gradient_dtype
        for dtype in (gradient_dtype, reduced_dtype):
            if dtype not in ("fp32", "bf16", "fp16"):
                raise ValueError(f"gradient dtype {dtype!r}: one of fp32, bf16, fp16")
        self.ranks = ranks
        self.numel = numel
        self.bits = bits
        self.beta = beta
        self.reset_interval = reset_interval
        self.memory = memory
        self.average = average
        self.gradient_dtype = gradient_dtype
        self.reduced_dtype = reduced_dtype
        self.steps = 0

        self.shard_size = -(-numel // ranks)
        if block_size == "shard":
            block_size = self.shard_size
        elif not isinstance(block_size, int) or block_size < 16 or block_size & (block_size - 1):
            raise ValueError(f"block size {block_size!r}: 'shard' or a power of two from 16")
        if labels is None:
            labels = np.arange(ranks * self.shard_size) % self.shard_size // block_size
        self.exact = np.flatnonzero(labels[:numel] == EXACT)
        # (shard, block, its elements) of every block that has any: neighbours of one label in one shard.
        self.places = [
            (shard, block, here)
            for shard, base in enumerate(range(0, ranks * self.shard_size, self.shard_size or 1))
            for block, here in enumerate(runs(labels, base, min(base + self.shard_size, numel)))
        ]
        # (start, stop) of the first shard's, counted from its start.
        self.blocks = [(here.start, here.stop) for shard, _, here in self.places if shard == 0]
        most = max((block + 1 for _, block, _ in self.places), default=0)
        self._scales_shape = (ranks, ranks, most)
        # Blocks of one length together: (their shards, their numbers, their elements' places [blocks, b]).
        self.lengths: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for length in sorted({here.stop - here.start for _, _, here in self.places}):
            alike = [place for place in self.places if place[2].stop - place[2].start == length]
            shards, numbers = (np.array([place[index] for place in alike]) for index in (0, 1))
            starts = np.array([here.start for _, _, here in alike])
            self.lengths.append((shards, numbers, starts[:, None] + np.arange(length)))
        self._memories = [_Memory((ranks, *here.shape), error_dtype) for _, _, here in self.lengths]

    def step(self, gradients: np.ndarray) -> StepResult:
        """One exchange of `gradients` [ranks, numel] in a step that the optimizer makes."""
        result = self.exchange(gradients)
        self.end_step()
        return replace(result, errors=self.errors())

    def exchange(self, gradients: np.ndarray) -> StepResult:
        """Every rank sends its row of `gradients`, every owner reduces its shard."""
        if gradients.shape != (self.ranks, self.numel):
            raise ValueError(f"gradients {gradients.shape}, expected {(self.ranks, self.numel)}")
        gradients = round_to_gradient_dtype(gradients, self.gradient_dtype)
        codes = np.zeros((self.ranks, self.numel), dtype=np.int16)
        scales = np.zeros(self._scales_shape, dtype=np.float32)
        sent = np.zeros((self.ranks, self.numel), dtype=np.float64)
        for memory, (shards, numbers, here) in zip(self._memories, self.lengths, strict=True):
            s, q = self._send(memory, gradients[:, here])
            codes[:, here] = q
            scales[:, shards, numbers] = s
            sent[:, here] = s[..., None].astype(np.float64) * q.astype(np.float64)
        return StepResult(codes, scales, sent, self.errors(), self._reduce(sent, gradients))

    def end_step(self, *, successful: bool = True, loss_scale_factor: float = 1.0) -> None:
        """What the optimizer's step does to the errors: a skipped one (and every T-th other) clears them,
        a change of the loss scale by a factor changes them by it."""
        self.steps += successful
        if not successful or (self.reset_interval and self.steps % self.reset_interval == 0):
            for memory in self._memories:
                memory.reset()
        for memory in self._memories:
            memory.rescale(loss_scale_factor)

    def errors(self) -> np.ndarray:
        """decode(e) of every rank, float64 [ranks, numel]."""
        errors = np.zeros((self.ranks, self.numel), dtype=np.float64)
        for memory, (_, _, here) in zip(self._memories, self.lengths, strict=True):
            errors[:, here] = memory.read()
        return errors

    def _send(self, memory: _Memory, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """From g to s, q and the new error, for blocks [ranks, blocks, b]; returns s and q."""
        if self.rotated_blocks and self.first:
            gradient = rotate(gradient)
        # A gradient near the largest fp32 may overflow here: that block is then sent as NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            h = gradient + memory.read()
            s = self.code.scale(h)
            q = self.code.codes(h, s)
            if self.memory:
                r = h - s[..., None] * q.astype(np.float32)
                old, new = np.float32(self.beta) * memory.read(), np.float32(1.0 - self.beta) * r
                memory.write(old + new, sent=~np.isnan(s))
        return s, q

    def _reduce(self, sent: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """The owner of each shard adds what the ranks sent, in rank order, in fp32; what is not coded in
        fp64."""
        shards = np.zeros((self.ranks, self.shard_size), dtype=np.float32)
        divisor = self.ranks if self.average else 1
        with np.errstate(over="ignore", invalid="ignore"):
            for owner in range(self.ranks):
                here = slice(owner * self.shard_size, (owner + 1) * self.shard_size)
                for sender in range(self.ranks):
                    # s*q has at most 8+7 significant bits: exact in fp32.
                    part = sent[sender, here].astype(np.float32)
                    shards[owner, : len(part)] += part
            flat = shards.reshape(-1)
            if self.last:
                flat[: self.numel] = self.rotated_back(flat[None, : self.numel])[0]
            flat /= np.float32(divisor)
            flat[self.exact] = gradients[:, self.exact].astype(np.float64).sum(axis=0) / divisor
        return round_to_gradient_dtype(shards, self.reduced_dtype)

    def rotated(self, values: np.ndarray) -> np.ndarray:
        """Numbers as they are coded, [n, numel], by block."""
        return self._by_block(values, rotate)

    def rotated_back(self, values: np.ndarray) -> np.ndarray:
        """What was sent, or a sum of it, [n, numel], as numbers that are not rotated."""
        return self._by_block(values, rotate_back)

    def _by_block(self, values: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        values = values.astype(np.float32)
        if self.rotated_blocks:
            for _, _, here in self.lengths:
                values[:, here] = change(values[:, here])
        return values
