"""Every exchange on real process groups: what is sent, kept and reduced is the simulation's to the last bit.

In two hops the process group adds a node's ranks in an order that is free. In fp32 it does not matter: all
gradients are multiples of 2^-18, and their sums are exact. In bf16 cases have two ranks on a node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_values import coded_values, sent_codes
from collectives.setups import loopback_bytes, setup_of
from seeds import seeded
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation, block_labels

from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
from megatron_patch.collectives.reduce_scatter import ReduceScatter
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.quantization.blocks import Contents, Span

STEPS = 4
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ROWS = [(0, (80, 96)), (7680, (200,))]
"""A matrix of short rows and a vector, with padding behind them: a bucket of WITH_ROWS elements."""
WITH_ROWS = 8192


def gradients(ranks: int, step: int, numel: int, dtype: str, bad: float | None) -> np.ndarray:
    """[ranks, numel], multiples of 2^-18; `bad` stands in the second step's, at the last rank."""
    random = np.random.default_rng(seeded(step))
    size = np.exp(random.uniform(-6, 0, size=-(-numel // 32))).repeat(32)[:numel]
    values = (np.rint(random.standard_normal((ranks, numel)) * size * 2**18) / 2**18).astype(np.float32)
    if numel == WITH_ROWS:
        values[:, 7880:] = 0
    if bad is not None and step == 1:
        values[-1, 5] = bad
    return round_to_gradient_dtype(values, dtype)


# --- functions that run in the workers -------------------------------------------------------------------


def exchange(
    kind: str,
    per_node: int,
    options: dict[str, Any],
    numel: int,
    dtype: str,
    average: bool,
    bad: float | None,
) -> dict[str, Any]:
    """Several exchanges of one bucket: what each sender sent and keeps, what was reduced, buffers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    setup = setup_of(ranks_per_node=per_node, topology="two_hop" if per_node > 1 else "flat", **options)
    spans = [Span.of(first, shape, exact=len(shape) < 2) for first, shape in ROWS]
    contents = Contents(numel, tuple(spans)) if numel == WITH_ROWS else Contents(numel)
    make = make_all_reduces if kind == "all-reduce" else make_reduce_scatters
    (one,) = make([contents], dist.group.WORLD, setup).exchanges
    assert ("two hops" in one.describe()) == (per_node > 1)
    report: dict[str, Any] = {"sent": [], "errors": [], "output": [], "nbytes": []}
    for step in range(STEPS):
        bucket = torch.from_numpy(gradients(ranks, step, numel, dtype, bad)[rank])
        bucket = bucket.to(getattr(torch, DTYPES[dtype]))
        output, before = bucket, bucket.clone()
        if kind != "all-reduce":
            output = bucket.view(ranks, -1)[rank]
            output = torch.full_like(output, 77.0) if step % 2 else output
        sent: list[dict[str, Any]] = [{} for _ in one.senders]
        with sent_codes(one.senders[0], sent[0]), sent_codes(one.senders[-1], sent[-1]):
            handle = one.start(bucket, output, average)
            if step % 2 and kind == "all-reduce":
                handle.advance()
                handle.advance()
                assert "sent" in sent[-1], "the second half has begun"
            handle.wait()
        after = output.clone()
        handle.wait()  # once only: a second wait changes nothing
        assert torch.equal(output.nan_to_num(7), after.nan_to_num(7))
        if kind != "all-reduce":  # Only the owner's shard may be written.
            before.view(ranks, -1)[rank].copy_(bucket.view(ranks, -1)[rank])
            assert torch.equal(bucket.nan_to_num(7), before.nan_to_num(7))
        report["sent"].append([entry["sent"] for entry in sent])
        errors = [sender.error for sender in one.senders if sender.error is not None]
        assert bool(errors) == (options.get("method") != "naive")
        report["errors"].append([coded_values(error.layout, error.decode()) for error in errors])
        report["output"].append(output.float())
        report["nbytes"].append(setup.workspace.nbytes)
    assert len(set(report["nbytes"])) == 1, "buffers come back"
    return report


def two_in_flight() -> dict[str, Any]:
    """Two buckets of one shape exchanged at once, waited for in the other order; then again."""
    setup, rank, numel = setup_of(method="naive", bits=8), dist.get_rank(), 1200
    exchanges = [ReduceScatter(Contents(numel), dist.group.WORLD, setup) for _ in range(2)]
    nbytes, off = [], []
    for step in range(3):
        buckets = [torch.from_numpy(gradients(4, 2 * step + k, numel, "fp32", None)[rank]) for k in range(2)]
        outputs = [torch.empty(numel // 4) for _ in range(2)]
        parts = zip(exchanges, buckets, outputs, strict=True)
        handles = [one.start(bucket, output, average=False) for one, bucket, output in parts]
        for handle in reversed(handles):
            handle.wait()
        nbytes.append(setup.workspace.nbytes)
        for bucket, output in zip(buckets, outputs, strict=True):
            dist.all_reduce(bucket)
            exact = bucket.view(4, -1)[rank]
            off.append(((output - exact).abs().max() / exact.abs().max()).item())
    return {"nbytes": nbytes, "off": off}


def wire_bytes(bits: int, numel: int, tries: int) -> tuple[int, int, float]:
    """What the interface counts while all ranks' payloads travel, the smallest of several tries; what they
    have, and what this rank says that it sends."""
    ranks = dist.get_world_size()
    reduce_scatter = ReduceScatter(Contents(numel), dist.group.WORLD, setup_of(method="naive", bits=bits))
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
        bucket = torch.randn(numel, generator=torch.Generator().manual_seed(seeded(dist.get_rank())))
        reduce_scatter.start(bucket, torch.empty(numel // ranks), average=False).wait()
    finally:
        dist.all_to_all_single = inner
    payload = reduce_scatter.sender.layout.payload_bytes
    return min(counted), ranks * (ranks - 1) * payload, reduce_scatter.traffic(bucket).between.nbytes


# --- tests -----------------------------------------------------------------------------------------------


def simulated(options: dict[str, Any]) -> dict[str, Any]:
    names = {"bits": "bits", "block_size": "block_size", "error_beta": "beta", "error_dtype": "error_dtype"}
    memory = options.get("method") != "naive"
    return {names[name]: value for name, value in options.items() if name in names} | {"memory": memory}


def labels_of(numel: int) -> np.ndarray | None:
    return block_labels(numel, ROWS, 128) if numel == WITH_ROWS else None


def rows(reports: list[dict[str, Any]], name: str, step: int, length: int) -> np.ndarray | None:
    """What the first senders of some ranks sent, or have as errors; None without errors."""
    if not reports[0][name][step]:
        return None
    return np.stack([report[name][step][0].numpy()[:length] for report in reports])


BOTH: list[tuple[int, int, dict[str, Any], int, str, bool, float | None]] = [
    (6, 2, {"bits": 4}, 1200, "fp32", False, None),
    (4, 1, {"bits": 4}, 1200, "fp32", False, None),
    (4, 1, {"bits": 8, "block_size": 64}, 1200, "bf16", True, None),
    (4, 1, {"bits": 2, "error_beta": 0.5, "error_dtype": "fp32"}, 1200, "fp16", False, None),
    (4, 1, {"bits": 1, "block_size": "shard", "error_dtype": "bf16"}, 1200, "fp32", True, None),
    (4, 1, {"bits": 4, "method": "naive"}, WITH_ROWS, "fp32", False, None),
    (4, 2, {"bits": 4}, 1200, "fp32", False, None),
    (4, 2, {"bits": 4}, 1200, "bf16", True, float("inf")),
    (4, 2, {"bits": 2, "block_size": 64, "error_beta": 0.5}, 1200, "fp32", True, float("nan")),
    (4, 2, {"bits": 8, "method": "naive"}, 1200, "bf16", False, None),
    (4, 2, {"bits": 4}, WITH_ROWS, "fp32", True, None),
    (6, 3, {"bits": 4}, 1200, "fp32", False, None),
    (8, 4, {"bits": 2}, 1200, "fp32", True, None),
]
"""Ranks, ranks on a node, options, elements, dtype, whether averages are asked for, what is not finite."""


@pytest.mark.parametrize(
    ("ranks", "local", "options", "numel", "dtype", "average", "bad"),
    [*BOTH, (2, 1, {"bits": 4}, 600, "fp32", True, None), (3, 1, {"bits": 4}, 900, "fp32", True, None)],
)
def test_a_reduce_scatter_is_the_simulation_s(pool, ranks, local, options, numel, dtype, average, bad):
    arguments = ("reduce-scatter", local, options, numel, dtype, average, bad)
    reports = pool.run(exchange, *arguments, world_size=ranks)
    labels, size, nodes = labels_of(numel), numel // ranks, ranks // local
    places = [slice(place, None, local) for place in range(local)]  # of the shards that a local rank sends
    agreements = []
    for place in places:
        mine = None if labels is None else labels.reshape(ranks, size)[place].reshape(-1)
        code = LoCoSimulation(
            nodes, nodes * size, labels=mine, gradient_dtype=dtype, reduced_dtype="fp32", **simulated(options)
        )
        agreements.append(Agreement(code))
    for step in range(STEPS):
        own = gradients(ranks, step, numel, dtype, bad).reshape(nodes, local, ranks, size)
        sums = round_to_gradient_dtype(own.sum(axis=1), dtype)
        for place, agreement in zip(places, agreements, strict=True):
            senders = reports[place]
            result = agreement.check(
                sums[:, place].reshape(nodes, -1),
                sent=rows(senders, "sent", step, nodes * size),
                errors=rows(senders, "errors", step, nodes * size),
            )
            for report, shard in zip(senders, result.shards, strict=True):
                wanted = shard / np.float32(ranks if average else 1)
                np.testing.assert_array_equal(
                    report["output"][step].numpy(), round_to_gradient_dtype(wanted, dtype)
                )


@pytest.mark.parametrize(
    ("ranks", "local", "options", "numel", "dtype", "average", "bad"),
    [
        *BOTH,
        (4, 1, {"bits": 4}, 1001, "bf16", True, None),
        (4, 1, {"bits": 4, "block_size": 16}, 5, "fp32", True, None),  # shards of 2, 2, 1 and 0 elements
        (4, 2, {"bits": 4}, 1003, "fp32", True, None),
        (4, 2, {"bits": 4}, 3, "fp32", False, None),
    ],
)
def test_an_all_reduce_is_the_simulation_s(pool, ranks, local, options, numel, dtype, average, bad):
    arguments = ("all-reduce", local, options, numel, dtype, average, bad)
    reports = pool.run(exchange, *arguments, world_size=ranks)
    nodes, labels = ranks // local, labels_of(numel)
    chunk = nodes * -(-numel // ranks)
    parts = [slice(start, min(start + chunk, numel)) for start in range(0, numel, chunk)]
    agreements = [
        AllReduceAgreement(
            nodes,
            part.stop - part.start,
            labels=None if labels is None else labels[part],
            gradient_dtype=dtype,
            **simulated(options),
        )
        for part in parts
    ]
    for step in range(STEPS):
        own = gradients(ranks, step, numel, dtype, bad).reshape(nodes, local, numel)
        sums, held = round_to_gradient_dtype(own.sum(axis=1), dtype), []
        for place, (part, agreement) in enumerate(zip(parts, agreements, strict=True)):
            senders, length = reports[place::local], part.stop - part.start
            lengths = [owner.simulation.numel for owner in agreement.owners]  # an empty shard has none
            factor = np.float32(ranks if average else 1)  # a power of two: it changes no code
            owners = list(zip(senders, lengths, strict=False))
            held.append(
                agreement.exchange(
                    sums[:, part],
                    sent=rows(senders, "sent", step, length),
                    owned=[report["sent"][step][1].numpy()[:n] * factor for report, n in owners],
                )
            )
            errors = rows(senders, "errors", step, length)
            agreement.end_step(
                errors=errors,
                owner_errors=None
                if errors is None
                else [report["errors"][step][1].numpy()[:n] * factor for report, n in owners],
            )
        wanted = round_to_gradient_dtype(np.concatenate(held) / np.float32(ranks if average else 1), dtype)
        for report in reports:
            np.testing.assert_array_equal(report["output"][step].numpy(), wanted)


def test_exchanges_in_flight_have_their_own_buffers_which_are_reused(pool):
    for report in pool.run(two_in_flight):
        assert len(set(report["nbytes"])) == 1
        assert max(report["off"]) < 0.02


@pytest.mark.alone
def test_the_interface_counts_the_bytes_that_the_payload_has(pool):
    numel = 8 * 2**20
    reports = pool.run(wire_bytes, 4, numel, tries=6)
    expected = reports[0][1]
    assert 8 * expected / (3 * numel) <= 4.2
    assert min(counted for counted, _, _ in reports) == pytest.approx(expected, rel=0.05)
    assert expected == sum(said for _, _, said in reports)


def test_the_pool_keeps_no_more_buffers_than_were_in_use_at_a_time() -> None:
    workspace = Workspace(torch.device("cpu"))
    for shape in ((2, 100), (4, 64), (1, 300), (3, 10), (2, 100)):
        first, second = workspace.take(*shape), workspace.take(*shape)
        assert first.shape == shape
        assert first.data_ptr() != second.data_ptr()
        workspace.give(first)
        workspace.give(second)
    assert workspace.nbytes == 600
    big, small = workspace.take(1, 300), workspace.take(1, 8)
    workspace.give(small)
    again = workspace.take(1, 200)
    assert again.data_ptr() == small.data_ptr()
    assert workspace.nbytes == 600
    workspace.give(big)
