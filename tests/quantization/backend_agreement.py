"""What every backend must do, on any device: the torch reference's bits."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st

from megatron_patch import loco
from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.backends import VARIABLE, Backend
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD, NONE
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

ROTATIONS = [NONE, HADAMARD, HADAMARD.hop(first=True), HADAMARD.hop(last=True), HADAMARD.hop()]
CODECS = st.one_of(
    st.builds(Uniform, st.sampled_from([8, 4, 2]), st.sampled_from(ROTATIONS)),
    st.builds(Levels, st.sampled_from([4, 2]), st.sampled_from(ROTATIONS)),
    st.builds(Sign, st.just(1), st.sampled_from(ROTATIONS)),
)
SEEDS = st.integers(0, 1000)
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
_KINDS = st.sampled_from(["plain", "not finite", "huge", "tiny", "ties"])
COMPRESS = {
    "dtype": _DTYPES,
    "error_dtype": st.sampled_from(["int8", "bf16", "fp32", None]),
    "beta": st.sampled_from([0.0, 0.5, 0.8]),
    "kind": _KINDS,
    "seed": SEEDS,
}
"""What `check_compress` takes beside backend, layout and device."""
DECOMPRESS = {
    "senders": st.integers(1, 9),
    "dtype": _DTYPES,
    "average": st.booleans(),
    "kind": _KINDS,
    "seed": SEEDS,
}
"""The same of `check_decompress_reduce`."""


def gradient_of(numel: int, seed: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Random numbers whose size varies, with stretches of zeros; `kind` adds what may go wrong."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(-8 * torch.rand(-(-numel // 40), generator=generator)).repeat_interleave(40)[:numel]
    size[torch.rand(numel, generator=generator) < 0.1] = 0
    values = torch.randn(numel, generator=generator) * size
    somewhere = torch.randint(numel, (3,), generator=generator)
    if kind == "not finite":
        values[somewhere] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    elif kind == "huge":
        values *= 3e38 / values.abs().max().clamp(min=1e-30)
    elif kind == "tiny":
        values *= 10.0 ** (seed % 4 - 40)  # Subnormal, and normal whose quotients are subnormal.
    elif kind == "ties":
        values = torch.randint(-7, 8, (numel,), generator=generator) / 2.0
    return values.to(dtype)


def random_spans(numel: int, seed: int, exact: bool = False) -> tuple[Span, ...]:
    """Parameters of any lengths and rows that fill `numel` elements in part: some gaps, the ends cut off.

    Vectors among them may be sent as they are (`exact`).
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    spans, start = [], -drawn(0, 200)
    while start < numel:
        row = (drawn(1, 20), drawn(16, 200), 128, 96, 160, drawn(200, 1000))[drawn(0, 6)]
        shape = (drawn(1, 8), row) if drawn(0, 4) else (row,)
        spans.append(Span.of(start, shape, exact=exact and len(shape) == 1))
        start += spans[-1].length + drawn(0, 3) * drawn(0, 70)
    return tuple(spans)


def even_spans(numel: int, seed: int) -> tuple[Span, ...]:
    """Parameters that begin, and whose rows end, at multiples of 16 elements; some gaps."""
    draw = random.Random(seed)
    spans, start = [], 0
    while start < numel:
        spans.append(Span.of(start, (draw.randint(1, 9), 16 * draw.choice([1, 3, 8, 10, 20]))))
        start += spans[-1].length + 16 * draw.choice([0, 0, 5])
    return tuple(spans)


def sender_of(
    layout: BlockLayout,
    device: torch.device,
    error_dtype: str | None = None,
    beta: float = 0.0,
    **options: Any,
) -> Sender:
    """A sender of `layout`; without an error where `error_dtype` is None."""
    if error_dtype is not None:
        options |= {"method": "loco", "error_dtype": error_dtype, "error_beta": beta}
    return Sender(CompressionConfig(**({"method": "naive", "bits": layout.bits} | options)), layout, device)


@contextmanager
def only_torch() -> Iterator[None]:
    """Within the block the reference is taken everywhere."""
    os.environ[VARIABLE] = "torch"
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def usable(codec: Codec, block_size: int | str) -> Codec:
    """The codec, without a rotation where a configuration has none."""
    return dataclasses.replace(codec, rotation=NONE) if block_size == "shard" else codec


def compress_by(
    backend: Backend | Any, sender: Sender, gradient: torch.Tensor, payload: torch.Tensor
) -> None:
    """Sender.compress by a backend, or by the torch reference, whatever the device would have."""
    error, beta = ({}, 0.0) if sender.error is None else (sender.error.tensors(), sender.error.beta)
    statistics = sender.statistics if sender.measures else None
    backend.compress(gradient, payload, sender.codec, sender.layout, error, beta, statistics)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def check_compress(
    backend: Backend | Any,
    codec: Codec,
    layout: BlockLayout,
    *,
    dtype: torch.dtype,
    error_dtype: str | None,
    beta: float,
    kind: str,
    seed: int,
    device: torch.device,
) -> None:
    """Three exchanges of one bucket, the second with gradients of `kind`; the last one measures nothing."""
    mine, theirs = (sender_of(layout, device, error_dtype, beta) for _ in range(2))
    mine.codec = theirs.codec = codec
    starts = layout.payload_starts
    sent, wanted = (torch.empty(int(starts[-1]) + 16, dtype=torch.uint8, device=device) for _ in range(2))
    places = torch.arange(len(sent))[:, None] - starts[:-1]
    coded = ((places >= 0) & (places < layout.coded_bytes)).any(1)
    for step in range(3):
        gradient = gradient_of(layout.numel, seed + step, dtype, kind if step == 1 else "plain").to(device)
        kept = gradient.clone()
        sent.fill_(0xA5)
        wanted.fill_(0x5A)
        assert backend.supports(mine.codec, layout)
        mine.measures = step < 2
        compress_by(backend, mine, gradient, sent)
        compress_by(loco, theirs, gradient, wanted)
        assert same(gradient, kept), "the gradient is read only"
        assert same(sent[coded], wanted[coded])
        assert (sent[~coded] == 0xA5).all(), "what is sent as it is lies there"
        if mine.error is not None and theirs.error is not None:
            for name, tensor in mine.error.tensors().items():
                assert same(tensor, theirs.error.tensors()[name]), name
        if not mine.measures:
            continue
        assert mine.statistics[4] == theirs.statistics[4]
        smallest = 1e-20 * float(theirs.statistics[:4].max())  # beside the largest, it does not matter
        torch.testing.assert_close(mine.statistics[:4], theirs.statistics[:4], rtol=1e-5, atol=smallest)


def check_decompress_reduce(
    backend: Backend | Any,
    codec: Codec,
    layout: BlockLayout,
    *,
    senders: int,
    dtype: torch.dtype,
    average: bool,
    kind: str,
    seed: int,
    device: torch.device,
) -> None:
    """The sum of several senders' payloads of one shard."""
    filled = -(-layout.numel // layout.shard_size)
    layout = layout.part(seed % filled)
    payloads = torch.empty(senders, layout.payload_bytes, dtype=torch.uint8, device=device)
    for index in range(senders):
        mine = kind if index == 0 or kind == "tiny" else "plain"  # Beside other numbers tiny ones are zeros.
        gradient = gradient_of(layout.numel, seed + index, torch.float32, mine)
        sender = sender_of(layout, device)
        sender.codec = codec
        compress_by(loco, sender, gradient.to(device), payloads[index : index + 1])
    length = layout.numel
    divisor = senders if average else 1
    found, wanted = (torch.full((length + 8,), 7.0, dtype=dtype, device=device) for _ in range(2))
    assert backend.supports(codec, layout)
    backend.decompress_reduce(payloads, sender.codec, layout, found[:length], divisor)
    loco.decompress_reduce(payloads, sender.codec, layout, wanted[:length], divisor)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same(found.nan_to_num(), wanted.nan_to_num())
    assert (found[length:] == 7).all(), "nothing is written beyond the shard"


def check_decompress(
    backend: Backend | Any,
    codec: Codec,
    layout: BlockLayout,
    *,
    dtype: torch.dtype,
    kind: str,
    seed: int,
    device: torch.device,
) -> None:
    """One payload of each shard, as an all-reduce ends; rows of the payload are longer than they need be."""
    sender = sender_of(layout, device)
    sender.codec = codec
    payload = torch.empty(layout.shards, layout.payload_bytes, dtype=torch.uint8, device=device)
    compress_by(loco, sender, gradient_of(layout.numel, seed, torch.float32, kind).to(device), payload)
    rows = torch.full((layout.shards, layout.payload_bytes + 32), 0xA5, dtype=torch.uint8, device=device)
    rows[:, : layout.payload_bytes] = payload
    found, wanted = (torch.full((layout.numel + 8,), 7.0, dtype=dtype, device=device) for _ in range(2))
    backend.decompress(rows, codec, layout, found[: layout.numel])
    one_shard = loco.decompress_reduce
    loco.decompress(payload, codec, layout, wanted[: layout.numel], one_shard)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same(found.nan_to_num(), wanted.nan_to_num())
    assert (found[layout.numel :] == 7).all(), "nothing is written beyond the tensor"
