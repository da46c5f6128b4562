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

It is written from the text alone, imports nothing of the project and loops plainly over ranks, shards and
blocks: slow, and meant to be read beside the text. What the text defines as an fp32 or bf16 value is
rounded exactly there (NumPy float32 arithmetic, bf16 by its bits); sums that the text leaves to the
implementation (the mean for 1 bit) and the values handed back are float64.

Where the order of a sum is free (a node's sum, of more than two ranks) a gradient is known up to its last
bits only: `slack` says how far. Wherever that decides something, the simulation also says what the other
decision gives, and no more (class Ties):

    the code             h/s near a half; at 1 bit h near 0
    the scale            max|h| or mean|h| near a bf16 number: the next one changes the whole block
    the error's code     beta*e + (1-beta)*r near a half of the error's own, much smaller scale; or of bf16
    the error's scale    its maximum near a bf16 number

What follows is exact again: s*q and a stored error are discrete, and so are the owners' sums of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

FLOAT32_MAX = np.finfo(np.float32).max

# How far h/s may lie from a rounding tie, relative to it, for two correct implementations to disagree.
NEAR_TIE = 1e-5

# Relative: an fp32 ulp, and what a handful of fp32 roundings of unlike inputs differ by.
ULP, ROUNDINGS = 2.0**-23, 2.0**-21


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


def code_range(
    block: np.ndarray, slack: np.ndarray, scale: np.float32, bits: int, near_tie: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest code of each element of a block; `block_codes` twice where there is no tie.

    A tie is within `slack` of the value, or within `near_tie` of h/s, relative: neighbouring codes. Slack
    larger than a code reaches further codes: of an error it may be, whose scale is that of what was lost.
    """
    codes = block_codes(block, scale, bits)
    if np.isnan(scale) or scale == 0:
        return codes, codes
    if bits == 1:
        tie = (np.abs(block) <= slack) & (slack > 0)
        return np.where(tie, -1, codes), np.where(tie, 1, codes)
    quotient, limit = block.astype(np.float64) / np.float64(scale), levels(bits)
    size = np.abs(quotient)
    reach = np.where(slack > 0, slack / np.float64(scale) + ULP * size, 0.0)
    reach = np.maximum(reach, near_tie * (np.floor(size) + 0.5))
    lowest, highest = np.ceil(quotient - reach - 0.5), np.floor(quotient + reach + 0.5)
    return tuple(
        np.clip(np.where(reach > 0, end, codes), -limit, limit).astype(np.int8) for end in (lowest, highest)
    )


def possible_scales(block: np.ndarray, slack: np.ndarray, bits: int) -> list[np.float32]:
    """The block's scale, then every other one that values within `slack` of it have."""
    own = block_scale(block, bits)
    if np.isnan(own) or not slack.any():
        return [own]
    magnitude, limit = np.abs(block.astype(np.float64)), levels(bits)
    choose = np.mean if bits == 1 else np.max
    low = choose(np.maximum(magnitude - slack, 0.0)) / limit
    high = choose(magnitude + slack) / limit
    if low == high:
        return [own]
    cap = float(bf16_down(float(FLOAT32_MAX) / limit))
    first, last = (
        int(_bits(bf16_up(np.float32(min(end, cap))))) >> 16 for end in (low * (1 - ULP), high * (1 + ULP))
    )
    scales = _from_bits(np.arange(first, last + 1, dtype=np.uint64) << np.uint64(16))
    return [own, *(scale for scale in scales if scale != own)]


@dataclass(frozen=True)
class Decoded:
    """What one block may decode to under one scale: from `low` to `high`, equal but at ties, and of its grid:
    s*q, -s or s at 1 bit, or any bf16 number where the scale is None."""

    low: np.ndarray
    high: np.ndarray
    scale: np.float32 | None
    bits: int = 8

    def holds(self, real: np.ndarray) -> np.ndarray:
        """Which elements of `real`, fp32, it may be."""
        inside = (self.low <= real) & (real <= self.high)
        if self.scale is None:
            on_grid = bf16_nearest(real) == real
        elif self.bits == 1:
            on_grid = np.abs(real) == self.scale
        else:
            step = self.scale if self.scale > 0 else np.float32(1)
            on_grid = np.rint(real / step) * step == real
        return _equal(real, self.low) | _equal(real, self.high) | (inside & on_grid)

    def times(self, factor: float) -> Decoded:
        """After `_Memory.rescale`."""
        factor = np.float32(factor)
        scale = None if self.scale is None else bf16_nearest(self.scale * factor)[()]
        return Decoded(self.low * factor, self.high * factor, scale, self.bits)


def possible(block: np.ndarray, slack: np.ndarray, bits: int, near_tie: float = 0.0) -> list[Decoded]:
    """What a block's values within `slack` may be sent as: of its own scale, then of the other ones."""
    found = []
    for scale in possible_scales(block, slack, bits):
        low, high = (
            scale * codes.astype(np.float32) for codes in code_range(block, slack, scale, bits, near_tie)
        )
        found.append(Decoded(low, high, scale, bits))
    return found


@dataclass(frozen=True)
class Ties:
    """What a correct implementation may hold instead of the simulation's values: (rank, place, one for every
    scale) of each block."""

    shape: tuple[int, int]
    blocks: list[tuple[int, slice, list[Decoded]]]

    @property
    def flags(self) -> np.ndarray:
        """Where a tie can decide, bool [ranks, numel]: an element, or a whole block by its scale."""
        near = np.zeros(self.shape, dtype=bool)
        for rank, here, (own, *others) in self.blocks:
            near[rank, here] = True if others else ~_equal(own.low, own.high)
        return near

    def explain(self, real: np.ndarray) -> np.ndarray:
        """Where `real`, fp32 [ranks, numel], is what some decision gives: one scale in a block, zeros in
        none."""
        explained = real == 0
        for rank, here, (own, *others) in self.blocks:
            block = real[rank, here]
            explained[rank, here] = own.holds(block)
            if any(other.holds(block).all() for other in others):
                explained[rank, here] = True
        return explained


def _equal(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))


# --- where blocks begin and end --------------------------------------------------------------------------


def block_labels(numel: int, parameters: list[tuple[int, tuple[int, ...]]], block_size: int) -> np.ndarray:
    """Which block each element of a bucket is in before shards cut it, int [numel]; -1: in none.

    `parameters` are (first element, shape). Blocks are counted from the beginning of every row of every
    parameter; a vector, and a parameter whose rows have less than 16 elements, is a single row.
    """
    labels = np.full(numel, -1)
    label = 0
    for first, shape in parameters:
        size = math.prod(shape)
        row = math.prod(shape[1:]) if len(shape) > 1 else size
        row = size if row < 16 else row
        for row_start in range(first, first + size, row):
            for start in range(row_start, row_start + row, block_size):
                labels[start : min(start + block_size, row_start + row)] = label
                label += 1
    return labels


def runs(labels: np.ndarray, start: int, stop: int) -> list[slice]:
    """The stretches of one label from `start` to before `stop`, without those labelled -1."""
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
    """The error of one block on one rank: int8 codes with a bf16 scale, or bf16 or fp32 values."""

    def __init__(self, length: int, dtype: str):
        self.length = length
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        self.values = np.zeros(self.length, dtype=np.float32)
        self.codes = np.zeros(self.length, dtype=np.int8)
        self.scale = np.float32(0)
        self.forget_ties()

    def forget_ties(self) -> None:
        """What is remembered stays, and is no matter of rounding any more."""
        self.possible = [Decoded(self.read(), self.read(), None)]

    def read(self) -> np.ndarray:
        if self.dtype == "int8":
            return self.scale * self.codes.astype(np.float32)
        return self.values

    def write(self, target: np.ndarray, slack: np.ndarray) -> None:
        """Remember `target`; `slack` is how far another implementation's may be from it."""
        if self.dtype == "int8":
            self.scale = block_scale(target, bits=8)
            self.codes = block_codes(target, self.scale, bits=8)
            self.possible = possible(target, slack, bits=8)
        elif self.dtype == "bf16":
            self.values = bf16_nearest(target)
            low, high = (bf16_nearest(target + end) for end in (-slack, slack))
            self.possible = [Decoded(low, high, None)]
        else:
            if slack.any():
                raise ValueError("fp32 errors keep every last bit: nothing could be compared")
            self.values = target.copy()
            self.forget_ties()

    def rescale(self, factor: float) -> None:
        """e <- factor * e; a power of two, as loss scales are, loses nothing."""
        self.scale = bf16_nearest(self.scale * np.float32(factor))[()]
        self.values = self.values * np.float32(factor)
        self.possible = [one.times(factor) for one in self.possible]


# --- all ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """What one step sent, remembered and reduced."""

    codes: np.ndarray  # int8 [ranks, numel]
    scales: np.ndarray  # float32 [ranks, shards, blocks], every value a bf16
    sent: np.ndarray  # float64 [ranks, numel], s*q
    errors: np.ndarray  # float64 [ranks, numel], decode(e) after the step (and after a reset)
    shards: np.ndarray  # float32 [ranks, S], what each owner gives its optimizer; zeros after a short one
    ties: Ties  # of what was sent

    @property
    def near_tie(self) -> np.ndarray:
        """bool [ranks, numel], where what is sent is a matter of rounding."""
        return self.ties.flags


class LoCoSimulation:
    """All ranks of a data-parallel group and one bucket, stepped together.

    `gradients` are rounded to `gradient_dtype` on entry, as a bucket of that dtype would hold them, and what
    the owners reduce to `reduced_dtype` (the same unless given). `labels` says which block each element is in
    (block_labels); without, blocks are counted from each shard's beginning. `memory=False` is quantization
    alone: the error is always zero. `step` is `exchange`, then `end_step` for a step that the optimizer did
    not skip.
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
        if labels is None:
            labels = np.arange(ranks * self.shard_size) % self.shard_size // block_size
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

    def exchange(self, gradients: np.ndarray, slack: np.ndarray | None = None) -> StepResult:
        """Every rank sends its row of `gradients`, every owner reduces its shard.

        `slack`, like `gradients`: how far another implementation's may be, whose sums have another order.
        """
        if gradients.shape != (self.ranks, self.numel):
            raise ValueError(f"gradients {gradients.shape}, expected {(self.ranks, self.numel)}")
        gradients = round_to_gradient_dtype(gradients, self.gradient_dtype)
        codes = np.zeros((self.ranks, self.numel), dtype=np.int8)
        scales = np.zeros(self._scales_shape, dtype=np.float32)
        sent = np.zeros((self.ranks, self.numel), dtype=np.float64)
        blocks = []
        slack = np.zeros(gradients.shape) if slack is None else slack

        for rank in range(self.ranks):
            for shard, block, here in self.places:
                place = (rank, shard, block)
                h, unsure, s, q = self._send_block(place, gradients[rank, here], slack[rank, here])
                codes[rank, here] = q
                scales[rank, shard, block] = s
                sent[rank, here] = np.float64(s) * q.astype(np.float64)
                blocks.append((rank, here, possible(h, unsure, self.bits, NEAR_TIE)))
        ties = Ties(gradients.shape, blocks)
        return StepResult(codes, scales, sent, self.errors(), self._reduce(sent), ties)

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

    def error_ties(self) -> Ties:
        """What may be remembered instead of `errors()`."""
        blocks = [
            (rank, here, self._memories[rank, shard, block].possible)
            for rank in range(self.ranks)
            for shard, block, here in self.places
        ]
        return Ties((self.ranks, self.numel), blocks)

    def _send_block(
        self, place: tuple[int, int, int], gradient: np.ndarray, slack: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
        """From g to s, q and the new error, for one block; returns h, how far it may be off, s and q."""
        memory = self._memories[place]
        memory.forget_ties()
        # A gradient near the largest fp32 may overflow here: that block is then sent as NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            h = gradient + memory.read()
            unsure = np.where(slack > 0, slack + ULP * np.abs(h.astype(np.float64)), 0.0)
        s = block_scale(h, self.bits)
        q = block_codes(h, s, self.bits)
        if self.memory and not np.isnan(s):
            r = h - s * q.astype(np.float32)
            old, new = np.float32(self.beta) * memory.read(), np.float32(1.0 - self.beta) * r
            rounding = ROUNDINGS * (np.abs(old) + np.abs(new))
            memory.write(old + new, np.where(slack > 0, (1.0 - self.beta) * unsure + rounding, 0.0))
        return h, unsure, s, q

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
