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


def test_only_the_lowest_bits_of_a_code_count():
    codes = torch.tensor([[-1, -7, 5, -128, 127]], dtype=torch.int8)
    for bits in ALL_BITS:
        assert torch.equal(pack(codes, bits), pack(codes & ((1 << bits) - 1), bits))


def test_known_bytes():
    assert pack(torch.tensor([[1, -1, 7, -7]], dtype=torch.int8), 4).tolist() == [[0xF1, 0x97]]
    assert pack(torch.tensor([[1, -1, 0, 1, -1]], dtype=torch.int8), 2).tolist() == [[0b01001101, 0b11]]
    assert pack(torch.tensor([[1, 0, 1, 1, 0, 0, 0, 1, 1]], dtype=torch.int8), 1).tolist() == [
        [0b10001101, 1]
    ]
    assert pack(torch.tensor([[-127, 127, 0]], dtype=torch.int8), 8).tolist() == [[0x81, 0x7F, 0]]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_code_survives_at_every_place(bits):
    for code in range(2**bits):
        for place in range(8):
            codes = torch.zeros(1, 8, dtype=torch.int16)
            codes[0, place] = code
            codes = codes.to(torch.int8)
            assert torch.equal(unpack(pack(codes, bits), bits, 8), codes)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_unpacking_reads_a_part_of_a_wider_buffer(bits):
    codes = random_codes(4, 100, bits)
    packed = pack(codes, bits)
    wide = torch.full((4, packed.shape[1] + 13), 0xAA, dtype=torch.uint8)
    wide[:, : packed.shape[1]] = packed
    assert torch.equal(unpack(wide[:, : packed.shape[1]], bits, 100), codes)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packing_leaves_its_input_alone(bits):
    codes = random_codes(2, 33, bits)
    before = codes.clone()
    pack(codes, bits)
    assert torch.equal(codes, before)
