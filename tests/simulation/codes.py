"""Blocks of numbers, their codes and scales: the codes of docs/numerics.md, and the rotation before them.

Written from the text alone, in NumPy. Blocks are [..., b], of one length; scales are [...]. A code here is
the whole number q for which a number is sent as s*q, whatever bits stand for it on the wire.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

FLOAT32_MAX = np.finfo(np.float32).max


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

LEVELS = {4: np.array([3, 9, 15, 21, 28, 36, 46, 61]), 2: np.array([3, 10])}
LEVEL_STEPS = {4: 0.0448032, 2: 0.151035}


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

    def scale(self, blocks: np.ndarray) -> np.ndarray:
        """The bf16 scale of every block, NaN if it holds a NaN or an infinity."""
        finite = np.isfinite(blocks).all(axis=-1)
        magnitude = np.abs(np.where(finite[..., None], blocks, np.float32(0)))
        return np.where(finite, np.minimum(bf16_up(self._wanted(magnitude)), self._cap), np.float32(np.nan))

    @property
    def _cap(self) -> np.float32:
        # Rounding up could make the largest q * s infinite for the largest gradients: it stops one earlier.
        return bf16_down(float(FLOAT32_MAX) / self.largest)

    def _wanted(self, magnitude: np.ndarray) -> np.ndarray:
        """What scales are rounded from, fp32."""
        if self.name == "sign":  # added one after the other in fp64
            return (np.cumsum(magnitude, axis=-1, dtype=np.float64)[..., -1] / magnitude.shape[-1]).astype(
                np.float32
            )
        if self.name == "uniform":
            return magnitude.max(axis=-1) / np.float32(self.largest)
        # c * rms, from whole numbers.
        exponent = _exponent(magnitude)
        whole = np.rint(64 * magnitude.astype(np.float64) * np.ldexp(1.0, -exponent)[..., None])
        root = np.sqrt((np.sum(whole**2, axis=-1) / magnitude.shape[-1]).astype(np.float32))
        step = root * np.float32(LEVEL_STEPS[self.bits] / 64)
        return np.ldexp(step.astype(np.float64), exponent).astype(np.float32)

    def codes(self, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The q of every element, int16; all zero in blocks whose scale is zero or NaN."""
        usable = (scales > 0)[..., None]
        if self.name == "sign":
            codes = np.where(blocks >= 0, 1, -1)
        else:
            blocks, scales = (
                np.where(usable, blocks, np.float32(0)),
                np.where(scales > 0, scales, np.float32(1)),
            )
            if self.name == "uniform":  # np.rint rounds halves to even
                codes = np.clip(np.rint(blocks / scales[..., None]), -self.largest, self.largest)
            else:
                codes = self._nearest(blocks.astype(np.float64) / scales[..., None].astype(np.float64))
        return np.where(usable, codes, 0).astype(np.int16)

    def _nearest(self, ratio: np.ndarray) -> np.ndarray:
        """The level nearest to h/s; in the middle of two that of the smaller magnitude, + for 0."""
        levels = LEVELS[self.bits]
        index = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(ratio), side="left")
        return (np.where(ratio < 0, -1, 1) * levels[index]).astype(np.int16)


def _exponent(magnitude: np.ndarray) -> np.ndarray:
    """That of the largest number of each block, from -126 to 126; -126 for zeros."""
    largest = magnitude.max(axis=-1)
    return np.where(largest > 0, np.clip(np.frexp(largest)[1] - 1, -126, 126), -126)


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
    stride, shape = 1, values.shape
    while stride < shape[-1]:
        pairs = values.reshape(*shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack([a + b, a - b], axis=-2).reshape(shape)
        stride *= 2
    return values


def _root(part: slice) -> np.float32:
    return np.float32((part.stop - part.start) ** -0.5)


def rotate(blocks: np.ndarray) -> np.ndarray:
    """H (d * x) of each part, fp32."""
    rotated, length = np.array(blocks, dtype=np.float32), blocks.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(length):
            rotated[..., part] = hadamard(rotated[..., part] * (signs(length)[part] * _root(part)))
    return rotated


def rotate_back(blocks: np.ndarray) -> np.ndarray:
    """d * (H y) of each part, fp32."""
    back, length = np.array(blocks, dtype=np.float32), blocks.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(length):
            back[..., part] = hadamard(back[..., part]) * (signs(length)[part] * _root(part))
    return back
