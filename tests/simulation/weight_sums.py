"""The two sums of a shard's weights, written from docs/weight_code.md with Python's integers."""

from __future__ import annotations


def hashed(number: int, rounds: list[tuple[int, int]], bits: int) -> int:
    """A number's bits mixed: in each round a shift to the right, xor, and a factor."""
    for shift, factor in rounds:
        number = (number ^ number >> shift) * factor % (1 << bits)
    return number


KEYS = [
    hashed((j + 1) * 0x9E3779B1 % (1 << 32), [(15, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)], 32)
    for j in range(1024)
]
MIX = [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]


def sums_by_hand(patterns: list[int]) -> list[int]:
    """The two sums of bit patterns from 0 to 65535."""
    return [first_sum(patterns), _sum(patterns, [(key << 16 | key >> 16) % (1 << 32) for key in KEYS])]


def first_sum(patterns: list[int]) -> int:
    return _sum(patterns, KEYS)


def _sum(patterns: list[int], keys: list[int]) -> int:
    total = 0
    for tile, start in enumerate(range(0, len(patterns), 2048)):
        x = patterns[start : start + 2048] + [0] * 2048
        w = [(x[2 * j] + (x[2 * j + 1] << 16) + keys[j]) % (1 << 32) for j in range(1024)]
        a = sum(w[j] * w[j + 1] for j in range(0, 1024, 2))
        total += hashed((a + (tile + 1) * 0x9E3779B97F4A7C15) % (1 << 64), MIX, 64)
    return total % (1 << 64)
