"""Codes in bytes: the bit order of the format, and back again, for every length."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.quantization.packing import pack, unpack

LENGTHS = range(1, 1001)
ALL_BITS = [1, 2, 4, 8]


def random_codes(rows: int, size: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 4096 * bits + size)
    return torch.randint(2**bits, (rows, size), generator=generator).to(torch.int8)  # 8 bits wrap


def packed_by_hand(codes: list[int], bits: int) -> list[int]:
    """The format spelled out: codes are one big integer, the first element in its lowest bits."""
    number = sum((code & ((1 << bits) - 1)) << (place * bits) for place, code in enumerate(codes))
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packing_and_unpacking_returns_the_codes_for_every_length(bits):
    for size in LENGTHS:
        codes = random_codes(2, size, bits)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, -(-size * bits // 8))
        restored = unpack(packed, bits, size)
        assert restored.dtype == torch.int8
        assert torch.equal(restored, codes), f"{size} elements"


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 31, 64, 125])
def test_bytes_are_those_of_the_format(bits, size):
    codes = random_codes(3, size, bits, seed=7)
    for row, packed in zip(codes.tolist(), pack(codes, bits).tolist(), strict=True):
        assert packed == packed_by_hand(row, bits)
