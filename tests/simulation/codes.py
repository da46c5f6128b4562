"""One block of numbers, its codes and its scale: the codes of docs/numerics.md, and the rotation before them.

Written from the text alone; NumPy, one block at a time. A code here is the whole number q for which a
number is sent as s*q, whatever bits stand for it on the wire.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

FLOAT32_MAX = np.finfo(np.float32).max
# Relative: an fp32 ulp.
ULP = 2.0**-23


# --- bf16: the upper 16 bits of an fp32 number -----------------------------------------------------------


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)


def from_bits(bits: np.ndarray) -> np.ndarray:
    # uint64 above, so that adding to the bits of the largest numbers cannot wrap around.
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def bf16_up(values: np.ndarray | float) -> np.ndarray:
    """Round non-negative fp32 values up to the next bf16; zero, infinity and NaN stay what they are."""
    values = np.asarray(values, dtype=np.float32)
    rounded = from_bits(bits_of(values) + np.uint64(0xFFFF))
    return np.where(np.isfinite(values), rounded, values)


def bf16_nearest(values: np.ndarray | float) -> np.ndarray:
    """Round fp32 values to the nearest bf16, ties to the even one."""
    values = np.asarray(values, dtype=np.float32)
    bits = bits_of(values)
    last_kept_bit = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = from_bits(bits + np.uint64(0x7FFF) + last_kept_bit)
    return np.where(np.isfinite(values), rounded, values)


def bf16_down(value: float) -> np.float32:
    """The largest bf16 that is not above a non-negative value."""
    candidate = np.float32(value)
    if float(candidate) > value:
        candidate = np.nextafter(candidate, np.float32(0))
    return from_bits(bits_of(candidate))[()]


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


# --- codes -----------------------------------------------------------------------------------------------

LEVELS = {
    4: np.array([3, 9, 15, 21, 28, 36, 46, 61]),
    3: np.array([3, 9, 16, 26]),
    2: np.array([3, 10]),
}
LEVEL_STEPS = {4: 0.0448032, 3: 0.0830666, 2: 0.151035}


@dataclass(frozen=True)
class Code:
    """`name`: uniform, levels or sign."""

    name: str
    bits: int

    @property
    def largest(self) -> int:
        """The largest q."""
        if self.name == "levels":
            return int(LEVELS[self.bits][-1])
        return 1 if self.name == "sign" else 2 ** (self.bits - 1) - 1

    @property
    def widest(self) -> int:
        """How far apart neighbouring q are at most."""
        if self.name == "uniform":
            return 1
        values = self.values()
        return int(np.diff(values).max())

    def values(self) -> np.ndarray:
        """Every q, in their order."""
        if self.name == "levels":
            return np.concatenate([-LEVELS[self.bits][::-1], LEVELS[self.bits]])
        return np.array([-1, 1]) if self.name == "sign" else np.arange(-self.largest, self.largest + 1)

    def scale(self, block: np.ndarray) -> np.float32:
        """The bf16 scale of a block, NaN if it holds a NaN or an infinity."""
        if not np.all(np.isfinite(block)):
            return np.float32(np.nan)
        return min(bf16_up(self._wanted(np.abs(block)))[()], self._cap)

    @property
    def _cap(self) -> np.float32:
        # Rounding up could make the largest q * s infinite for the largest gradients: it stops one earlier.
        return bf16_down(float(FLOAT32_MAX) / self.largest)

    def _wanted(self, magnitude: np.ndarray) -> np.float32:
        """What the scale is rounded from."""
        if self.name == "sign":
            total = 0.0
            for value in magnitude:
                total += float(value)
            return np.float32(total / len(magnitude))
        if self.name == "uniform":
            return magnitude.max() / np.float32(self.largest)
        exponent = math.frexp(float(magnitude.max()))[1] - 1 if magnitude.any() else -126
        return self._of_energy(magnitude.astype(np.float64), min(max(exponent, -126), 126))

    def _of_energy(self, magnitude: np.ndarray, exponent: int) -> np.float32:
        """c * rms of a block whose largest number has this exponent, from whole numbers."""
        whole = np.rint(64 * magnitude * 2.0**-exponent)
        root = np.sqrt(np.float32(np.sum(whole**2) / len(magnitude)))
        step = root * np.float32(LEVEL_STEPS[self.bits] / 64)
        return np.float32(float(step) * 2.0**exponent)

    def codes(self, block: np.ndarray, scale: np.float32) -> np.ndarray:
        """The q of one block, int16; all zero where the scale is zero or NaN."""
        if np.isnan(scale) or scale == 0:
            return np.zeros(len(block), dtype=np.int16)
        if self.name == "sign":
            return np.where(block >= 0, 1, -1).astype(np.int16)
        if self.name == "uniform":  # np.rint rounds halves to even
            return np.clip(np.rint(block / scale), -self.largest, self.largest).astype(np.int16)
        return self._nearest(block.astype(np.float64) / np.float64(scale))

    def _nearest(self, ratio: np.ndarray) -> np.ndarray:
        """The level nearest to h/s; in the middle of two that of the smaller magnitude, + for 0."""
        levels = LEVELS[self.bits]
        index = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(ratio), side="left")
        return (np.where(ratio < 0, -1, 1) * levels[index]).astype(np.int16)

    def range(
        self, block: np.ndarray, slack: np.ndarray, scale: np.float32, near_tie: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lowest and the highest q of each element of a block; `codes` twice where there is no tie.

        A tie is within `slack` of the value, or within `near_tie` of h/s, relative: neighbouring codes. Slack
        larger than a code reaches further codes: of an error it may be, whose scale is that of what was lost.
        """
        codes = self.codes(block, scale)
        if np.isnan(scale) or scale == 0:
            return codes, codes
        if self.name == "sign":
            tie = (np.abs(block) <= slack) & (slack > 0)
            return np.where(tie, -1, codes), np.where(tie, 1, codes)
        quotient = block.astype(np.float64) / np.float64(scale)
        size = np.abs(quotient)
        reach = np.where(slack > 0, slack / np.float64(scale) + ULP * size, 0.0)
        if self.name == "levels":  # middles times s are exact: without slack there are no ties
            low, high = self._nearest(quotient - reach), self._nearest(quotient + reach)
            return np.where(reach > 0, low, codes), np.where(reach > 0, high, codes)
        reach = np.maximum(reach, near_tie * (np.floor(size) + 0.5))
        lowest, highest = np.ceil(quotient - reach - 0.5), np.floor(quotient + reach + 0.5)
        low, high = (
            np.clip(np.where(reach > 0, end, codes), -self.largest, self.largest).astype(np.int16)
            for end in (lowest, highest)
        )
        return low, high

    def scales(self, block: np.ndarray, slack: np.ndarray) -> list[np.float32]:
        """The block's scale, then every other one that values within `slack` of it have."""
        own = self.scale(block)
        if np.isnan(own) or not slack.any():
            return [own]
        low, high = self._wanted_within(np.abs(block.astype(np.float64)), slack)
        if low == high:
            return [own]
        first, last = (
            int(bits_of(bf16_up(np.float32(min(end, float(self._cap)))))) >> 16
            for end in (low * (1 - ULP), high * (1 + ULP))
        )
        scales = from_bits(np.arange(first, last + 1, dtype=np.uint64) << np.uint64(16))
        return [own, *(scale for scale in scales if scale != own)]

    def _wanted_within(self, magnitude: np.ndarray, slack: np.ndarray) -> tuple[float, float]:
        least, most = np.maximum(magnitude - slack, 0.0), magnitude + slack
        if self.name != "levels":
            choose = np.mean if self.name == "sign" else np.max
            return choose(least) / self.largest, choose(most) / self.largest
        # The largest number decides what the whole numbers are of.
        exponents = {
            min(max(math.frexp(float(ends.max()))[1] - 1, -126), 126) for ends in (least, most) if ends.any()
        }
        found = [float(self._of_energy(ends, e)) for ends in (least, most) for e in exponents]
        return min(found), max(found)

    def on_grid(self, real: np.ndarray, scale: np.float32) -> np.ndarray:
        """Which numbers are a q times the scale."""
        step = scale if scale > 0 else np.float32(1)
        q = np.rint(real / step)
        known = np.isin(q, self.values()) if scale > 0 else q == q
        return known & (q * step == real)


# --- the rotation ----------------------------------------------------------------------------------------


@functools.cache
def signs(length: int) -> np.ndarray:
    """The fixed signs of a block's first elements: the top bit of a hash of their places."""
    found = []
    for place in range(length):
        x = place * 0x9E3779B1 % 2**32
        x ^= x >> 15
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        found.append(-1.0 if x >= 2**31 else 1.0)
    return np.array(found, dtype=np.float32)


def parts(length: int) -> list[slice]:
    """The stretches of a block that are rotated: powers of two, the largest first."""
    found, start = [], 0
    while start < length:
        size = 1 << ((length - start).bit_length() - 1)
        found.append(slice(start, start + size))
        start += size
    return found


def hadamard(values: np.ndarray) -> np.ndarray:
    """fp32, a power of two of them: the Sylvester matrix times them, neighbours added first."""
    stride = 1
    while stride < len(values):
        pairs = values.reshape(-1, 2, stride)
        a, b = pairs[:, 0], pairs[:, 1]
        values = np.stack([a + b, a - b], axis=1).reshape(-1)
        stride *= 2
    return values


def _root(part: slice) -> np.float32:
    return np.float32((part.stop - part.start) ** -0.5)


def rotate(block: np.ndarray) -> np.ndarray:
    """H (d * x) of each part, fp32."""
    rotated, sign = np.array(block, dtype=np.float32), signs(len(block))
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(block)):
            rotated[part] = hadamard(rotated[part] * (sign[part] * _root(part)))
    return rotated


def rotate_back(block: np.ndarray) -> np.ndarray:
    """d * (H y) of each part, fp32."""
    back, sign = np.array(block, dtype=np.float32), signs(len(block))
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(block)):
            back[part] = hadamard(back[part]) * (sign[part] * _root(part))
    return back


def rotated_slack(slack: np.ndarray, block: np.ndarray) -> np.ndarray:
    """How far `rotate` of values within `slack` of a block may be from that of the block."""
    found = np.zeros(len(block))
    for part in parts(len(block)):
        if slack[part].any():
            size = part.stop - part.start
            rounded = (size.bit_length() + 1) * ULP * np.abs(block[part].astype(np.float64)).sum()
            found[part] = (slack[part].sum() + rounded) * size**-0.5
    return found
