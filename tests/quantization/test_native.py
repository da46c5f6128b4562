"""The native CPU kernels: energies of long blocks, every length. Their bits: test_backends.py."""

from __future__ import annotations

import pytest
import torch
from quantization.backend_agreement import compress_by, gradient_of, same, sender_of

from megatron_patch import loco
from megatron_patch.collectives.sender import decompress
from megatron_patch.quantization import native
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD, NONE
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

pytestmark = pytest.mark.skipif(not native.variants(), reason="no compiler was there when this was installed")

CPU = torch.device("cpu")
EVERY = [
    *(Uniform(bits, rotation) for bits in (8, 4, 2) for rotation in (NONE, HADAMARD)),
    *(Levels(bits, rotation) for bits in (4, 2) for rotation in (NONE, HADAMARD)),
    Sign(),
]


@pytest.mark.parametrize("codec", [Uniform(4), Levels(4), Sign()], ids=str)
@pytest.mark.parametrize("variant", range(len(native.variants())))
def test_the_energies_of_a_long_block_are_as_exact_as_those_of_a_short_one(codec, variant):
    layout = BlockLayout.of(1_000_000, 1, codec.bits, "shard")
    gradient = 1 + torch.rand(1_000_000, generator=torch.Generator().manual_seed(1))
    mine, theirs = sender_of(layout, CPU), sender_of(layout, CPU)
    mine.codec = theirs.codec = codec
    payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8)
    with native.using(variant):
        compress_by(native, mine, gradient, payload)
    compress_by(loco, theirs, gradient, payload)
    torch.testing.assert_close(mine.statistics, theirs.statistics, rtol=1e-6, atol=0)


def test_no_instruction_set_s_code_runs_as_the_library_is_loaded():
    """A table that is filled then is filled by AVX-512 on every processor, and most of them lack it."""
    assert b"_GLOBAL__sub_I_" not in native.LIBRARY.read_bytes(), "g++'s name for what runs at loading"


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_every_length_from_1_to_1000_comes_back(codec):
    """The last block of some ends within a byte, within a word, and within what a vector takes at once."""
    for size in range(1, 1001, 1 if codec.bits == 4 else 7):
        layout = BlockLayout.of(size, 1, codec.bits, 128)
        gradient = gradient_of(size, size, torch.float32, "plain")
        payload = torch.full((1, layout.payload_bytes), 0xFF, dtype=torch.uint8)
        sender = sender_of(layout, CPU)
        sender.codec = codec
        sender.compress(gradient, payload)
        decoded, wanted = torch.empty(size), torch.empty(size)
        decompress(payload, codec, layout, decoded)
        loco.decompress_reduce(payload, codec, layout, wanted)
        assert same(decoded, wanted)
