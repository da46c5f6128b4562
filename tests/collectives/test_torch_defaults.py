"""No number depends on torch's default dtype, and no table lands on torch's default device.

Scripts set both: `torch.set_default_dtype(torch.bfloat16)` while a model is built, or for all of a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.setups import setup_of
from quantization.backend_agreement import gradient_of, only_torch, random_spans
from seeds import seeded

from megatron_patch.collectives.all_reduce import AllReduce
from megatron_patch.collectives.reduce_scatter import ReduceScatter
from megatron_patch.collectives.sender import Sender, decompress_reduce
from megatron_patch.collectives.topology import two_hops
from megatron_patch.collectives.two_hop import TwoHopAllReduce, TwoHopReduceScatter
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.onebit_adam import norm_sketch
from megatron_patch.quantization import packing, rotation
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.weights import code
from megatron_patch.weights.batch import Batch
from megatron_patch.weights.gather import WeightGather, agree

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float64]
META = "meta"
"""As a default device: whatever is allocated there cannot be read."""
CODES = [
    *({"bits": bits, "codec": "uniform"} for bits in (8, 4, 2)),
    *({"bits": bits, "rotation": rotation} for bits in (4, 2) for rotation in ("none", "hadamard")),
    {"bits": 1},
]  # fmt: skip
ERRORS = ("int8", "bf16", "fp32")


@contextmanager
def defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    """Within the block torch has these defaults, and nothing is cached that was computed under others."""
    for cached in (rotation.signs, packing.largest_scale, norm_sketch.signs):
        cached.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def fingerprint(tensors: list[torch.Tensor]) -> str:
    raw = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).hexdigest()


def assert_same_under_all_defaults(work: Callable[[], Any]) -> None:
    with defaults(torch.float32, None):
        wanted = work()
    assert wanted
    for dtype in DTYPES:
        with defaults(dtype, None):
            assert work() == wanted, dtype
    with defaults(None, META):
        assert work() == wanted


def exchanged(options: dict[str, Any], error: str, gradients: list[torch.Tensor], spans: Any) -> str:
    """Two gradients through a sender: payloads, errors, statistics, and what the owners make of them."""
    numel, shards = gradients[0].numel(), 3
    found = [torch.full_like(gradient, 7.0) for gradient in gradients]
    config = CompressionConfig(**{"error_dtype": error, "block_size": 64} | options)
    layout = BlockLayout.of(numel, shards, config.bits, config.block_size, spans=spans)
    sender = Sender(config, layout, CPU)
    kept = []
    for gradient, output in zip(gradients, found, strict=True):
        payload = torch.zeros(1, sum(layout.payload_sizes), dtype=torch.uint8, device=CPU)
        sender.compress(gradient, payload)
        starts = layout.payload_starts.tolist()
        for shard, part in enumerate(output.split(layout.shard_size)):
            own = layout.part(shard)
            received = payload[:, starts[shard] : starts[shard] + own.payload_bytes].clone()
            decompress_reduce(received, sender.codec, own, part, 2)
        kept += [payload, output.clone(), sender.statistics.clone()]
    return fingerprint([*kept, *sender.state().values()])


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("options", CODES, ids=str)
def test_a_sender_s_bits_do_not_depend_on_torch_s_defaults(kernels, options):
    spans = random_spans(3000, seeded(3), exact=True)
    gradients = [gradient_of(3000, seeded(step), torch.float32, "plain") for step in range(2)]

    def work() -> list[str]:
        return [exchanged(options, error, gradients, spans) for error in ERRORS]

    if kernels == "torch":
        with only_torch():
            assert_same_under_all_defaults(work)
    else:
        assert_same_under_all_defaults(work)


@pytest.mark.parametrize("numel", [2047, 2048, 4095])
def test_the_weight_code_s_reference_does_not_depend_on_torch_s_defaults(numel):
    """Shares of 1,024 on both sides of a half, where a rounded half would be another frequency."""

    def work() -> list[str]:
        found = []
        for changed in 511, 1023, 1024, 1025:
            old = torch.arange(numel, dtype=torch.int16, device=CPU)
            new = old.clone()
            new[:changed] += 1
            message = torch.zeros(code.bound(numel), dtype=torch.uint8, device=CPU)
            facts = torch.zeros(code.FACTS, dtype=torch.int64, device=CPU)
            size = code.encode(old, new, False, message, facts)
            shards, verdict = old[None].clone(), torch.zeros(1, dtype=torch.int32, device=CPU)
            code.decode(message[None], torch.tensor([[0, size]], device=CPU), shards, -1, verdict)
            found.append(fingerprint([message[:size], facts, shards, verdict]))
        return found

    assert_same_under_all_defaults(work)


def test_the_norm_s_sketch_does_not_depend_on_torch_s_defaults():
    values = gradient_of(5000, seeded(4), torch.float32, "plain")

    def folded() -> str:
        sketch = norm_sketch.NormSketch(3, CPU)
        sketch.add(values, 0.5)
        return fingerprint([norm_sketch.fold(sketch._pieces, norm_sketch.signs(CPU))])

    assert_same_under_all_defaults(folded)


# --- over process groups ---------------------------------------------------------------------------------


def exchanges(dtype: str, device: str | None) -> list[str]:
    """In a worker: every exchange, and an exact weight gather, under these defaults."""
    group, rank, numel = dist.group.WORLD, dist.get_rank(), 1600
    contents = Contents(numel, random_spans(numel, seeded(5), exact=True))
    hops, found = two_hops(group, 2), []
    weights = gradient_of(numel, seeded(9), torch.bfloat16, "plain")
    gradients = [gradient_of(numel, seeded(10 * step + rank), torch.float32, "plain") for step in range(2)]
    with defaults(getattr(torch, dtype), device):
        for kind in (ReduceScatter, AllReduce, TwoHopReduceScatter, TwoHopAllReduce):
            exchange = kind(contents, hops if kind.__name__.startswith("Two") else group, setup_of(bits=4))
            for gradient in gradients:
                tensor = gradient.clone()
                whole = kind.__name__.endswith("AllReduce")
                output = tensor if whole else tensor.view(group.size(), -1)[rank]
                exchange.start(tensor, output, average=True).wait()
                found.append(output.clone())
            found += [t for sender in exchange.senders for t in sender.state().values()]
        gather = WeightGather(weights, group, Workspace(CPU), "bucket 0")
        gather.remember()
        gather._own[::3] += 1
        (agreed,) = agree([gather])
        assert agreed.saves
        assert agreed.difference is None
        Batch([gather]).start(gather._workspace, own_may_have_changed=True).wait()
        found.append(weights)
    return [fingerprint([tensor]) for tensor in found]


def test_exchanges_do_not_depend_on_torch_s_defaults(pool):
    wanted = pool.run(exchanges, "float32", None, world_size=4)
    for dtype, device in [("bfloat16", None), ("float64", None), ("float32", META)]:
        assert pool.run(exchanges, dtype, device, world_size=4) == wanted
