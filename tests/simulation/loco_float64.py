"""An independent simulation of the numbers in docs/numerics.md, as an oracle for tests.

The idea of one step, for N ranks that each hold a gradient of B elements:

    for every sender n, shard j (S = B/N elements) and block (b elements, never across a shard):
        h  = g + e                       what the sender wants to say, in fp32
        s  = max|h| / L, rounded up      one bf16 scale per block; mean|h| for 1 bit
        q  = round(h / s)                the code that travels, in [-L, L]
        e <- beta*e + (1-beta)*(h - s*q) what was lost, kept in 8 bits
    for every shard j, at its owner: g_j = sum over n of s_n*q_n

Where N does not divide B, S = ceil(B/N) and the last shards are short or empty.

It is written from the text alone, imports nothing of the project and loops plainly over ranks, shards and
blocks: slow, and meant to be read beside the text. What the text defines as an fp32 or bf16 value is
rounded exactly there (NumPy float32 arithmetic, bf16 by its bits); sums that the text leaves to the
implementation (the mean for 1 bit) and the values handed back are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

FLOAT32_MAX = np.finfo(np.float32).max

# How far h/s may lie from a rounding tie, relative to it, for two correct implementations to disagree.
NEAR_TIE = 1e-5


# --- bf16: the upper 16 bits of an fp32 number -----------------------------------------------------------


def _bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)


def _from_bits(bits: np.ndarray) -> np.ndarray:
    # uint64 above, so that adding to the bits of the largest numbers cannot wrap around.
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def bf16_up(values: np.ndarray | float) -> np.ndarray:
    """Round non-negative fp32 values up to the next bf16; zero, infinity and NaN stay what they are."""
    values = np.asarray(values, dtype=np.float32)
    rounded = _from_bits(_bits(values) + np.uint64(0xFFFF))
    return np.where(np.isfinite(values), rounded, values)


def bf16_nearest(values: np.ndarray | float) -> np.ndarray:
    """Round fp32 values to the nearest bf16, ties to the even one."""
    values = np.asarray(values, dtype=np.float32)
    bits = _bits(values)
    last_kept_bit = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = _from_bits(bits + np.uint64(0x7FFF) + last_kept_bit)
    return np.where(np.isfinite(values), rounded, values)


def bf16_down(value: float) -> np.float32:
    """The largest bf16 that is not above a non-negative value."""
    candidate = np.float32(value)
    if float(candidate) > value:
        candidate = np.nextafter(candidate, np.float32(0))
    return _from_bits(_bits(candidate))[()]


def round_to_gradient_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values rounded to what a gradient of this dtype can hold, as fp32."""
    if dtype == "fp32":
        return np.asarray(values, dtype=np.float32)
    if dtype == "bf16":
        return bf16_nearest(values)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype=np.float32).astype(np.float16).astype(np.float32)
    raise ValueError(f"gradient dtype {dtype!r}: one of fp32, bf16, fp16")


# --- one block: numbers <-> codes and a scale ------------------------------------------------------------


def levels(bits: int) -> int:
    """L: codes run from -L to L. One bit has the codes -1 and +1."""
    return {8: 127, 4: 7, 2: 1, 1: 1}[bits]


def block_scale(block: np.ndarray, bits: int) -> np.float32:
    """The bf16 scale of one block, NaN if the block holds a NaN or an infinity."""
    if not np.all(np.isfinite(block)):
        return np.float32(np.nan)
    magnitude = np.abs(block)
    limit = levels(bits)
    if bits == 1:
        total = 0.0
        for value in magnitude:
            total += float(value)
        exact = np.float32(total / len(block))
    else:
        exact = magnitude.max() / np.float32(limit)
    # Rounding up could make L*s infinite for the largest gradients: the scale stops one bf16 earlier.
    cap = bf16_down(float(FLOAT32_MAX) / limit)
    return min(bf16_up(exact)[()], cap)


def block_codes(block: np.ndarray, scale: np.float32, bits: int) -> np.ndarray:
    """The int8 codes of one block; all zero where the scale is zero or NaN."""
    if np.isnan(scale) or scale == 0:
        return np.zeros(len(block), dtype=np.int8)
    if bits == 1:
        return np.where(block >= 0, 1, -1).astype(np.int8)
    limit = levels(bits)
    # np.rint rounds halves to even.
    return np.clip(np.rint(block / scale), -limit, limit).astype(np.int8)


def block_near_ties(block: np.ndarray, scale: np.float32, bits: int) -> np.ndarray:
    """Where a last-bit difference in h/s may move the code by one. The sign (1 bit) never depends on s."""
    if bits == 1 or np.isnan(scale) or scale == 0:
        return np.zeros(len(block), dtype=bool)
    quotient = np.abs(block.astype(np.float64) / np.float64(scale))
    tie = np.floor(quotient) + 0.5
    return np.abs(quotient - tie) <= NEAR_TIE * tie


# --- what a sender remembers -----------------------------------------------------------------------------


class _Memory:
    """The error of one block on one rank: int8 codes with a bf16 scale, or bf16 or fp32 values."""

    def __init__(self, length: int, dtype: str):
        self.length = length
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        self.values = np.zeros(self.length, dtype=np.float32)
        self.codes = np.zeros(self.length, dtype=np.int8)
        self.scale = np.float32(0)

    def read(self) -> np.ndarray:
        if self.dtype == "int8":
            return self.scale * self.codes.astype(np.float32)
        return self.values

    def write(self, target: np.ndarray) -> None:
        if self.dtype == "int8":
            self.scale = block_scale(target, bits=8)
            self.codes = block_codes(target, self.scale, bits=8)
        elif self.dtype == "bf16":
            self.values = bf16_nearest(target)
        else:
            self.values = target.copy()

    def rescale(self, factor: float) -> None:
        """e <- factor * e; a power of two, as loss scales are, loses nothing."""
        self.scale = bf16_nearest(self.scale * np.float32(factor))[()]
        self.values = self.values * np.float32(factor)


# --- all ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """What one step sent, remembered and reduced."""

    codes: np.ndarray  # int8 [ranks, numel]
    scales: np.ndarray  # float32 [ranks, shards, blocks], every value a bf16
    sent: np.ndarray  # float64 [ranks, numel], s*q
    errors: np.ndarray  # float64 [ranks, numel], decode(e) after the step (and after a reset)
    shards: np.ndarray  # float32 [ranks, S], what each owner gives its optimizer; zeros after a short one
    near_tie: np.ndarray  # bool [ranks, numel], where a code may differ by one


class LoCoSimulation:
    """All ranks of a data-parallel group and one bucket, stepped together.

    `gradients` are rounded to `gradient_dtype` on entry, as a bucket of that dtype would hold them, and what
    the owners reduce to `reduced_dtype` (the same unless given). `memory=False` is quantization alone: the
    error is always zero. `step` is `exchange`, then `end_step` for a step that the optimizer did not skip.
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
    ):
        if bits not in (8, 4, 2, 1):
            raise ValueError(f"bits {bits!r}: one of 8, 4, 2, 1")
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
        # (start, stop) of every block, counted from the start of its shard; the last may be short.
        self.blocks = [
            (start, min(start + block_size, self.shard_size))
            for start in range(0, self.shard_size, block_size)
        ]
        # (shard, block, its elements) of every block that has any.
        self.places = [
            (shard, block, slice(base + start, min(base + stop, numel)))
            for shard, base in enumerate(range(0, ranks * self.shard_size, self.shard_size or 1))
            for block, (start, stop) in enumerate(self.blocks)
            if base + start < numel
        ]
        self._memories = {
            (rank, shard, block): _Memory(here.stop - here.start, error_dtype)
            for rank in range(ranks)
            for shard, block, here in self.places
        }

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
        codes = np.zeros((self.ranks, self.numel), dtype=np.int8)
        scales = np.zeros((self.ranks, self.ranks, len(self.blocks)), dtype=np.float32)
        sent = np.zeros((self.ranks, self.numel), dtype=np.float64)
        near_tie = np.zeros((self.ranks, self.numel), dtype=bool)

        for rank in range(self.ranks):
            for shard, block, here in self.places:
                h, s, q = self._send_block((rank, shard, block), gradients[rank, here])
                codes[rank, here] = q
                scales[rank, shard, block] = s
                sent[rank, here] = np.float64(s) * q.astype(np.float64)
                near_tie[rank, here] = block_near_ties(h, s, self.bits)
        return StepResult(codes, scales, sent, self.errors(), self._reduce(sent), near_tie)

    def end_step(self, *, successful: bool = True, loss_scale_factor: float = 1.0) -> None:
        """What the optimizer's step does to the errors: a skipped one (and every T-th other) clears them,
        a change of the loss scale by a factor changes them by it."""
        self.steps += successful
        if not successful or (self.reset_interval and self.steps % self.reset_interval == 0):
            for memory in self._memories.values():
                memory.reset()
        for memory in self._memories.values():
            memory.rescale(loss_scale_factor)

    def errors(self) -> np.ndarray:
        """decode(e) of every rank, float64 [ranks, numel]."""
        errors = np.zeros((self.ranks, self.numel), dtype=np.float64)
        for rank in range(self.ranks):
            for shard, block, here in self.places:
                errors[rank, here] = self._memories[rank, shard, block].read()
        return errors

    def _send_block(
        self, place: tuple[int, int, int], gradient: np.ndarray
    ) -> tuple[np.ndarray, np.float32, np.ndarray]:
        """From g to s, q and the new error, for one block; returns h, s and q."""
        memory = self._memories[place]
        # A gradient near the largest fp32 may overflow here: that block is then sent as NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            h = gradient + memory.read()
        s = block_scale(h, self.bits)
        q = block_codes(h, s, self.bits)
        if self.memory and not np.isnan(s):
            r = h - s * q.astype(np.float32)
            target = np.float32(self.beta) * memory.read() + np.float32(1.0 - self.beta) * r
            memory.write(target)
        return h, s, q

    def _reduce(self, sent: np.ndarray) -> np.ndarray:
        """The owner of each shard adds what the ranks sent, in rank order, in fp32."""
        shards = np.zeros((self.ranks, self.shard_size), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for owner in range(self.ranks):
                here = slice(owner * self.shard_size, (owner + 1) * self.shard_size)
                for sender in range(self.ranks):
                    # s*q has at most 8+7 significant bits: exact in fp32.
                    part = sent[sender, here].astype(np.float32)
                    shards[owner, : len(part)] += part
            if self.average:
                shards /= np.float32(self.ranks)
        return round_to_gradient_dtype(shards, self.reduced_dtype)
