"""The low-bit reduce-scatter on real process groups: what arrives, where, and what it costs on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds import seeded
from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation

RANKS = 4
SHARD = 300
DTYPES = ("fp32", "bf16")


def gradient_of(rank: int, step: int, numel: int) -> np.ndarray:
    random = np.random.default_rng((seeded(rank), step))
    size = np.exp(random.uniform(-6, 0, size=-(-numel // 32))).repeat(32)[:numel]
    return (random.standard_normal(numel) * size).astype(np.float32)


# --- functions that run in the workers -------------------------------------------------------------------


def exchange(options: dict[str, Any], dtype: str, average: bool, aliased: bool, steps: int) -> dict[str, Any]:
    """Several exchanges of one bucket; what was sent, what is remembered and what was reduced, per step."""
    import torch
    import torch.distributed as dist
    from coded_values import coded_values, decoded
    from collectives.setups import setup_of

    from megatron_patch.collectives.reduce_scatter import ReduceScatter
    from megatron_patch.quantization.blocks import Contents

    rank, ranks = dist.get_rank(), dist.get_world_size()
    setup = setup_of(**options)
    reduce_scatter = ReduceScatter(Contents(ranks * SHARD), dist.group.WORLD, setup)
    sender, layout = reduce_scatter.sender, reduce_scatter.sender.layout
    kept = []
    compress = sender.compress

    def recording(gradient: torch.Tensor, payload: torch.Tensor) -> None:
        compress(gradient, payload)
        kept.append(coded_values(layout, decoded(sender, payload)))

    sender.compress = recording
    report: dict[str, Any] = {"sent": kept, "errors": [], "shards": [], "rest": [], "nbytes": []}
    for step in range(steps):
        bucket = torch.from_numpy(gradient_of(rank, step, layout.numel)).to(getattr(torch, dtype))
        before = bucket.clone()
        own = slice(rank * SHARD, (rank + 1) * SHARD)
        output = bucket[own] if aliased else torch.full((SHARD,), 77.0, dtype=bucket.dtype)
        handle = reduce_scatter.start(bucket, output, average)
        handle.wait()
        after = output.clone()
        handle.wait()  # once only: a second wait changes nothing
        assert torch.equal(output, after)
        before[own] = bucket[own]
        report["rest"].append(torch.equal(bucket, before))
        report["shards"].append(output.float())
        if sender.error is not None:
            report["errors"].append(coded_values(layout, sender.error.decode()))
        report["nbytes"].append(setup.workspace.nbytes)
    report["expected_nbytes"] = 2 * ranks * layout.payload_bytes
    return report


def two_in_flight() -> dict[str, Any]:
    """Two buckets of one shape exchanged at once, waited for in the other order; then again."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.reduce_scatter import ReduceScatter
    from megatron_patch.quantization.blocks import Contents

    setup = setup_of(method="naive", bits=8)
    exchanges = [ReduceScatter(Contents(RANKS * SHARD), dist.group.WORLD, setup) for _ in range(2)]
    nbytes, errors = [], []
    for step in range(3):
        buckets = [
            torch.from_numpy(gradient_of(dist.get_rank(), 10 * step + k, RANKS * SHARD)) for k in range(2)
        ]
        outputs = [torch.empty(SHARD) for _ in range(2)]
        handles = [
            one.start(bucket, output, average=False)
            for one, bucket, output in zip(exchanges, buckets, outputs, strict=True)
        ]
        for handle in reversed(handles):
            handle.wait()
        nbytes.append(setup.workspace.nbytes)
        for bucket, output in zip(buckets, outputs, strict=True):
            dist.all_reduce(bucket)
            exact = bucket[dist.get_rank() * SHARD : (dist.get_rank() + 1) * SHARD]
            errors.append(((output - exact).abs().max() / exact.abs().max()).item())
    return {"nbytes": nbytes, "errors": errors}


def loopback_bytes() -> int:
    """Bytes sent over `lo` since boot, by this machine's own count."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def wire_bytes(bits: int, numel: int, tries: int) -> dict[str, Any]:
    """What the interface counts while the payloads of all ranks travel, the smallest of several tries."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.reduce_scatter import ReduceScatter
    from megatron_patch.quantization.blocks import Contents

    ranks = dist.get_world_size()
    reduce_scatter = ReduceScatter(Contents(numel), dist.group.WORLD, setup_of(method="naive", bits=bits))
    layout = reduce_scatter.sender.layout
    counted: list[int] = []
    inner = dist.all_to_all_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        # Other processes use the loopback interface too: their bytes only add, so the least count is ours.
        for _ in range(tries):
            dist.barrier()
            before = loopback_bytes()
            dist.barrier()
            work = inner(*args, **kwargs)
            work.wait()
            dist.barrier()
            counted.append(loopback_bytes() - before)
            dist.barrier()
        return work

    dist.all_to_all_single = counting
    try:
        generator = torch.Generator().manual_seed(seeded(dist.get_rank()))
        bucket = torch.randn(numel, generator=generator)
        shard = torch.empty(layout.shard_size)
        reduce_scatter.start(bucket, shard, average=False).wait()
    finally:
        dist.all_to_all_single = inner
    return {
        "counted": min(counted),
        "expected": ranks * (ranks - 1) * layout.payload_bytes,
        "bits_per_element": 8 * layout.payload_bytes / layout.shard_size,
        "traffic": reduce_scatter.traffic(bucket).between.nbytes,
        "shard_norm": shard.norm().item(),
    }


# --- tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "average", "aliased"),
    [
        ({"bits": 4}, "float32", False, True),
        ({"bits": 4}, "bfloat16", True, True),
        ({"bits": 8, "block_size": 64}, "float32", True, False),
        ({"bits": 2, "error_beta": 0.5, "error_dtype": "fp32"}, "bfloat16", False, False),
        ({"bits": 1, "block_size": "shard", "error_dtype": "bf16"}, "float32", True, True),
        ({"bits": 4, "method": "naive"}, "float32", False, True),
    ],
)
def test_every_owner_gets_its_shard_s_sum_and_nothing_else_moves(pool, options, dtype, average, aliased):
    steps = 5
    reports = pool.run(exchange, options, dtype, average, aliased, steps)
    memory = options.get("method") != "naive"
    agreement = Agreement(
        LoCoSimulation(
            RANKS,
            RANKS * SHARD,
            bits=options["bits"],
            block_size=options.get("block_size", 128),
            beta=options.get("error_beta", 0.8),
            error_dtype=options.get("error_dtype", "int8"),
            memory=memory,
            average=average,
            gradient_dtype={"float32": "fp32", "bfloat16": "bf16"}[dtype],
        )
    )
    for step in range(steps):
        agreement.check(
            np.stack([gradient_of(rank, step, RANKS * SHARD) for rank in range(RANKS)]),
            sent=np.stack([report["sent"][step].numpy() for report in reports]),
            errors=np.stack([report["errors"][step].numpy() for report in reports]) if memory else None,
            shards=np.stack([report["shards"][step].numpy() for report in reports]),
        )
    for report in reports:
        assert all(report["rest"]), "only the owner's shard may be written, and only after it was read"
        assert report["nbytes"] == [report["expected_nbytes"]] * steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_group_sizes(pool, world_size):
    steps = 2
    reports = pool.run(exchange, {"bits": 4}, "float32", True, True, steps, world_size=world_size)
    agreement = Agreement(LoCoSimulation(world_size, world_size * SHARD, bits=4, average=True))
    for step in range(steps):
        agreement.check(
            np.stack([gradient_of(rank, step, world_size * SHARD) for rank in range(world_size)]),
            sent=np.stack([report["sent"][step].numpy() for report in reports]),
            errors=np.stack([report["errors"][step].numpy() for report in reports]),
            shards=np.stack([report["shards"][step].numpy() for report in reports]),
        )


def test_exchanges_in_flight_have_their_own_buffers_which_are_reused(pool):
    for report in pool.run(two_in_flight):
        assert len(set(report["nbytes"])) == 1
        assert max(report["errors"]) < 0.02


@pytest.mark.alone
def test_the_interface_counts_the_bytes_that_the_payload_has(pool):
    reports = pool.run(wire_bytes, 4, 8 * 2**20, tries=6)
    counted = min(report["counted"] for report in reports)
    expected = reports[0]["expected"]
    assert reports[0]["bits_per_element"] <= 4.2
    assert counted == pytest.approx(expected, rel=0.05)
    assert expected == sum(report["traffic"] for report in reports)
    assert all(report["shard_norm"] > 0 for report in reports)
