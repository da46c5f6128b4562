"""Every backend gives the torch reference's bits: native variants, Triton interpreted, Triton on a GPU.

And which backend serves what: a codec or a cut that a backend does not know is the reference's.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantization.backend_agreement import (
    CODECS,
    COMPRESS,
    DECOMPRESS,
    check_compress,
    check_decompress,
    check_decompress_reduce,
    even_spans,
    only_torch,
    random_spans,
    sender_of,
    usable,
)

from megatron_patch.collectives.sender import decompress
from megatron_patch.quantization import backends, native, triton_kernels
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Any cut, and some whose blocks all have a multiple of 16.
ALIGNED = [(1024, 1), (4096, 4), (2048, 2), (3120, 3)]


@dataclass(frozen=True)
class OnDevice:
    """A backend on a device; tests draw `examples` buckets of up to `most` elements."""

    name: str
    backend: Any
    device: str
    most: int
    examples: int
    blocks: tuple[int | str, ...]
    without: str = ""
    """Why it cannot run here."""
    variant: int | None = field(default=None)

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.variant is None else native.using(self.variant)


GPU = "" if torch.cuda.is_available() and not INTERPRETED else "no GPU is there"
NO_INTERPRETER = "" if INTERPRETED else "TRITON_INTERPRET is 0"
BACKENDS = [
    *(
        OnDevice(f"native-{name}", native, "cpu", 3000, 120, (16, 64, 128, 1024, "shard"), variant=index)
        for index, name in enumerate(native.variants())
    ),
    OnDevice("triton-interpreted", triton_kernels, "cpu", 1500, 20, (16, 64, 128, 1024), NO_INTERPRETER),
    OnDevice("triton-gpu", triton_kernels, "cuda", 300_000, 300, (16, 64, 128, 1024, 4096), GPU),
]


def each_of(backends: list[OnDevice]) -> pytest.MarkDecorator:
    """`tested` is each of them in turn, skipped where it cannot run."""
    return pytest.mark.parametrize(
        "tested",
        [
            pytest.param(one, id=one.name, marks=pytest.mark.skipif(bool(one.without), reason=one.without))
            for one in backends
        ],
    )


every_backend = each_of(BACKENDS)
SPANS = st.one_of(st.none(), st.integers(0, 10_000))
"""The seed of random parameters that blocks follow, with an odd one but for vectors; None: blocks are counted
from the shard."""
MINUS_ZERO = {"dtype": torch.float32, "error_dtype": "bf16", "beta": 0.0, "kind": "tiny"}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@every_backend
def test_codes_scales_and_errors_are_the_reference_s_bits(tested):
    shapes = st.one_of(st.tuples(st.integers(1, tested.most), st.integers(1, 9)), st.sampled_from(ALIGNED))

    @given(shape=shapes, codec=CODECS, block_size=st.sampled_from(tested.blocks), spans=SPANS, **COMPRESS)
    # A gradient of -0 with a code of 0: what is lost is -0.
    @example(shape=(116, 1), codec=Uniform(8), block_size=16, spans=None, seed=0, **MINUS_ZERO)
    @settings(max_examples=tested.examples, deadline=None)
    def check(shape, codec, block_size, spans, **options):
        spans = None if spans is None else random_spans(shape[0], spans, exact=spans % 2 == 1)
        layout = BlockLayout.of(*shape, codec.bits, block_size, spans=spans)
        check_compress(
            tested.backend, usable(codec, block_size), layout, device=torch.device(tested.device), **options
        )

    with tested.chosen():
        check()


@every_backend
@pytest.mark.parametrize("shape", [(1024, 1), (3120, 3)])
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Levels(4, HADAMARD), torch.float32), (Uniform(2), torch.bfloat16), (Sign(), torch.float16)],
)
def test_blocks_that_begin_at_multiples_of_16(tested, shape, codec, dtype):
    """Which are loaded 16 elements at a time: those of most parameters."""
    layout = BlockLayout.of(*shape, codec.bits, 128, spans=even_spans(shape[0], 1))
    assert layout.table.multiples_of_16
    options = {"error_dtype": "int8", "beta": 0.8, "kind": "plain", "seed": 1}
    with tested.chosen():
        device = torch.device(tested.device)
        check_compress(tested.backend, codec, layout, dtype=dtype, device=device, **options)


@every_backend
@pytest.mark.parametrize(
    ("codec", "block"),
    [(Levels(4, HADAMARD), 128), (Levels(2, HADAMARD), 16), (Uniform(8), 64), (Uniform(2), 16), (Sign(), 16)],
)
def test_whole_blocks_of_which_a_shard_has_fewer_than_others(tested, codec, block):
    """As where a bucket has norms beside matrices: one shard's blocks are fewer, and all are whole."""
    spans = [Span(0, 13 * block, 13 * block), Span.of(13 * block, (2 * block,), exact=True)]
    spans.append(Span(15 * block, 12 * block, 4 * block))
    layout = BlockLayout.of(28 * block, 2, codec.bits, block, spans=spans)
    assert layout.table.whole
    assert [int((row > 0).sum()) for row in layout.lengths(CPU)] == [13, 12]
    with tested.chosen():
        device = torch.device(tested.device)
        for dtype in (torch.float32, torch.bfloat16):
            options = {"dtype": dtype, "kind": "plain", "seed": 1, "device": device}
            check_compress(tested.backend, codec, layout, error_dtype="int8", beta=0.8, **options)
            for shard in range(2):
                check_decompress_reduce(
                    tested.backend, codec, layout, senders=3, average=True, **options | {"seed": shard}
                )
            if hasattr(tested.backend, "decompress"):
                check_decompress(tested.backend, codec, replace(layout, exact=None), **options)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@every_backend
def test_the_reduced_shard_is_the_reference_s_bits(tested):
    @given(
        size=st.integers(1, tested.most),
        shards=st.integers(1, 3),
        codec=CODECS,
        block_size=st.sampled_from(tested.blocks),
        spans=SPANS,
        **DECOMPRESS,
    )
    @settings(max_examples=tested.examples, deadline=None)
    def check(size, shards, codec, block_size, spans, **options):
        spans = None if spans is None else random_spans(size, spans, exact=spans % 2 == 1)
        layout = BlockLayout.of(size, shards, codec.bits, block_size, spans=spans)
        check_decompress_reduce(
            tested.backend, usable(codec, block_size), layout, device=torch.device(tested.device), **options
        )

    with tested.chosen():
        check()


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@each_of([tested for tested in BACKENDS if hasattr(tested.backend, "decompress")])
def test_all_shards_in_one_launch_are_the_reference_s_bits(tested):
    @given(
        size=st.integers(1, tested.most),
        shards=st.integers(1, 9),
        codec=CODECS,
        block_size=st.sampled_from(tested.blocks),
        spans=SPANS,
        dtype=DECOMPRESS["dtype"],
        kind=DECOMPRESS["kind"],
        seed=DECOMPRESS["seed"],
    )
    @settings(max_examples=tested.examples // 2, deadline=None)
    def check(size, shards, codec, block_size, spans, **options):
        spans = None if spans is None else random_spans(size, spans, exact=spans % 2 == 1)
        layout = BlockLayout.of(size, shards, codec.bits, block_size, spans=spans)
        check_decompress(tested.backend, codec, layout, device=torch.device(tested.device), **options)

    check()


# --- what a backend serves -------------------------------------------------------------------------------


class Doubled(Uniform):
    """A code that no kernel knows: half the levels, of twice the size."""

    name = "doubled"

    @property
    def levels(self) -> int:
        return super().levels // 2


def test_a_codec_that_no_kernel_knows_is_the_reference_s(monkeypatch):
    """The CPU kernels would send it wrongly, without an error."""
    layout, codec = BlockLayout.of(256, 2, 4, 128), Doubled(4)
    for backend in (native, triton_kernels):
        assert not backend.supports(codec, layout)
    assert backends.fused(codec, layout, CPU) is None
    sender = sender_of(layout, CPU)
    sender.codec = codec
    gradient, payload = torch.linspace(-1, 1, 256), torch.empty(2, layout.payload_bytes, dtype=torch.uint8)
    sender.compress(gradient, payload)
    decoded = torch.empty(256)
    decompress(payload, codec, layout, decoded)
    assert (decoded - gradient).abs().max() < 0.18  # half a step of 1/3, rounded up to bf16
    assert (decoded - gradient).abs().max() > 0.1


def test_one_scale_for_a_shard_is_left_to_the_reference_by_triton():
    codec = Uniform(4)
    for block_size, numel in (("shard", 10_000), (8192, 2 * 8192)):
        layout = BlockLayout.of(numel, 2, 4, block_size)
        assert not triton_kernels.supports(codec, layout)
        assert native.supports(codec, layout)


@pytest.mark.skipif(not native.variants(), reason="no compiler was there when this was installed")
def test_the_reference_can_be_asked_for():
    codec, layout = Uniform(4), BlockLayout.of(1000, 2, 4, 128)
    assert backends.fused(codec, layout, CPU) is native
    assert native.variants()[-1] in backends.describe(CPU)
    with only_torch():
        assert backends.fused(codec, layout, CPU) is None
        assert backends.VARIABLE in backends.describe(CPU)


def test_without_the_library_the_reference_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(native, "variants", tuple)
    assert backends.fused(Uniform(4), BlockLayout.of(1000, 2, 4, 128), CPU) is None
    assert "no compiler" in backends.describe(CPU)
