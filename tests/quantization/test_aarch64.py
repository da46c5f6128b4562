"""The aarch64 wheel's kernels give the reference's bits: cross-compiled, and run by qemu (emulated.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.backend_agreement import (
    CODECS,
    COMPRESS,
    DECOMPRESS,
    check_compress,
    check_decompress_reduce,
    random_spans,
    same,
    usable,
)
from quantization.emulated import Library, emulating
from weights.weight_coders import ANY, NORMAL, changed

import hatch_build
from megatron_patch.quantization import native
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.weights import code
from megatron_patch.weights import native as native_weights

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [program for program in (CROSS, QEMU) if shutil.which(program) is None]
CPU = torch.device("cpu")
SPANS = st.one_of(st.none(), st.integers(0, 10_000))

if MISSING and not os.environ.get("CI"):
    way_out = "apt install g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    pytest.skip(f"{MISSING[0]} is missing: {way_out}", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    folder = tmp_path_factory.mktemp("aarch64")
    hatch_build.compile_library(ROOT / hatch_build.SOURCES, folder / "library.so", "aarch64")
    emulator = folder / "emulator"
    subprocess.run([CROSS, "-O1", HERE / "emulator.cpp", "-o", emulator, "-ldl"], check=True)
    command = [QEMU, "-L", "/usr/aarch64-linux-gnu", str(emulator)]
    with emulating(command, folder / "library.so") as emulated:
        yield emulated


def test_it_is_another_machine_s_library(library: Library) -> None:
    assert library.megatron_loco_variants() == 1, "baseline: aarch64 has no others"
    assert native.loaded() is library


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_codes_scales_and_errors_are_the_reference_s_bits(library: Library) -> None:
    before = library.calls

    @given(
        shape=st.tuples(st.integers(1, 3000), st.integers(1, 9)),
        codec=CODECS,
        block_size=st.sampled_from([16, 64, 128, 1024, "shard"]),
        spans=SPANS,
        **COMPRESS,
    )
    @settings(max_examples=80, deadline=None)
    def check(shape, codec, block_size, spans, **options):
        spans = None if spans is None else random_spans(shape[0], spans)
        layout = BlockLayout.of(*shape, codec.bits, block_size, spans=spans)
        check_compress(native, usable(codec, block_size), layout, device=CPU, **options)

    check()
    assert library.calls >= before + 3 * 80


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_the_reduced_shard_is_the_reference_s_bits(library: Library) -> None:
    @given(
        size=st.integers(1, 3000),
        shards=st.integers(1, 3),
        codec=CODECS,
        block_size=st.sampled_from([16, 64, 128, 1024, "shard"]),
        spans=SPANS,
        **DECOMPRESS,
    )
    @settings(max_examples=80, deadline=None)
    def check(size, shards, codec, block_size, spans, **options):
        spans = None if spans is None else random_spans(size, spans)
        layout = BlockLayout.of(size, shards, codec.bits, block_size, spans=spans)
        check_decompress_reduce(native, usable(codec, block_size), layout, device=CPU, **options)

    check()


@given(
    numel=st.integers(1, 9000),
    spread=st.sampled_from([1, 2, 40, 40_000]),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    fp16=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_weights_come_back_from_the_reference_s_bytes(library, numel, spread, share, fp16, seed):
    before, after = changed(numel, seed, spread, share, NORMAL if seed % 2 else ANY, fp16)
    messages, facts = [], torch.zeros(2, code.FACTS, dtype=torch.int64)
    for encode, told in zip((native_weights.encode, code.encode), facts, strict=True):
        message = torch.full((code.bound(numel),), 0xA5, dtype=torch.uint8)
        messages.append(message[: encode(before, after, fp16, message, told)])
    assert same(*messages)
    assert same(*facts)
    decoded, found = before.clone(), torch.full((1,), -1, dtype=torch.int32)
    whole = torch.tensor([[0, messages[0].numel()]])
    native_weights.decode(messages[0][None], whole, decoded[None], -1, found)
    assert found == 0
    assert same(decoded, after)
    assert same(native_weights.sums(after), code.sums(after))
    shorter = whole - torch.tensor([[0, 1]])
    native_weights.decode(messages[0][None, :-1].clone(), shorter, before.clone()[None], -1, found)
    assert found != 0
