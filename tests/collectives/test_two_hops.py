"""Exchanges in two hops: what is sent between nodes, kept and reduced is the simulation's to the last bit.

A node's ranks are added by the process group, in an order that is free: with two of them it does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seeds import seeded
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation, block_labels

RANKS, LOCAL, STEPS = 4, 2, 3
NODES = RANKS // LOCAL
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = [(0, (80, 96)), (7680, (200,))]
"""A matrix of short rows and a vector, with padding behind them."""
WITH_ROWS = 8192


def gradients(step: int, numel: int, dtype: str, bad: float | None) -> np.ndarray:
    """[RANKS, numel]; `bad` stands in the second step's, at rank 3."""
    random = np.random.default_rng(seeded(step))
    size = np.exp(random.uniform(-6, 0, size=-(-numel // 32))).repeat(32)[:numel]
    values = (random.standard_normal((RANKS, numel)) * size).astype(np.float32)
    if numel == WITH_ROWS:
        values[:, 7880:] = 0
    if bad is not None and step == 1:
        values[3, 5] = bad
    return round_to_gradient_dtype(values, dtype)


def exchange(
    kind: str, options: dict[str, Any], numel: int, dtype: str, average: bool, bad: float | None
) -> dict[str, Any]:
    """In a worker: some exchanges of one bucket, and what this rank's senders sent and keep."""
    import torch
    import torch.distributed as dist
    from coded_values import coded_values, sent_codes
    from collectives.setups import setup_of

    from megatron_patch.collectives import two_hop
    from megatron_patch.collectives.topology import two_hops
    from megatron_patch.quantization.blocks import Contents, Span

    rank, setup = dist.get_rank(), setup_of(**options)
    spans = [Span.of(first, shape, exact=len(shape) < 2) for first, shape in ROWS]
    contents = Contents(numel, tuple(spans)) if numel == WITH_ROWS else Contents(numel)
    one = getattr(two_hop, kind)(contents, two_hops(dist.group.WORLD, LOCAL), setup)
    report: dict[str, Any] = {"sent": [], "errors": [], "output": [], "nbytes": []}
    for step in range(STEPS):
        bucket = torch.from_numpy(gradients(step, numel, dtype, bad)[rank]).to(getattr(torch, DTYPES[dtype]))
        output = bucket if kind == "TwoHopAllReduce" else bucket.view(RANKS, -1)[rank]
        of_senders: list[dict[str, Any]] = [{} for _ in one.senders]
        with sent_codes(one.senders[0], of_senders[0]), sent_codes(one.senders[-1], of_senders[-1]):
            one.start(bucket, output, average).wait()
        report["sent"].append([entry["sent"] for entry in of_senders])
        report["errors"].append(
            [coded_values(s.layout, s.error.decode()) for s in one.senders if s.error is not None]
        )
        report["output"].append(output.float())
        report["nbytes"].append(setup.workspace.nbytes)
    return report


CASES: list[tuple[dict[str, Any], int, str, bool, float | None]] = [
    ({"bits": 4}, 1200, "fp32", False, None),
    ({"bits": 4}, 1200, "bf16", True, float("inf")),
    ({"bits": 2, "block_size": 64, "error_beta": 0.5}, 1200, "fp32", True, float("nan")),
    ({"bits": 8, "method": "naive"}, 1200, "bf16", False, None),
    ({"bits": 4}, WITH_ROWS, "fp32", True, None),
]


def simulated(options: dict[str, Any]) -> dict[str, Any]:
    names = {"bits": "bits", "block_size": "block_size", "error_beta": "beta"}
    memory = options.get("method") != "naive"
    return {names[name]: value for name, value in options.items() if name in names} | {"memory": memory}


def labels_of(numel: int) -> np.ndarray | None:
    return block_labels(numel, ROWS, 128) if numel == WITH_ROWS else None


@pytest.mark.parametrize(("options", "numel", "dtype", "average", "bad"), CASES)
def test_a_reduce_scatter_is_the_simulation_s(pool, options, numel, dtype, average, bad):
    reports = pool.run(exchange, "TwoHopReduceScatter", options, numel, dtype, average, bad, world_size=RANKS)
    labels, size = labels_of(numel), numel // RANKS
    places = [slice(local, None, LOCAL) for local in range(LOCAL)]  # of the shards that a local rank sends
    agreements = []
    for place in places:
        mine = None if labels is None else labels.reshape(RANKS, size)[place].reshape(-1)
        code = LoCoSimulation(NODES, NODES * size, labels=mine, gradient_dtype=dtype, **simulated(options))
        agreements.append(Agreement(code))
    for step in range(STEPS):
        by_node = gradients(step, numel, dtype, bad).reshape(NODES, LOCAL, RANKS, size).sum(axis=1)
        sums = round_to_gradient_dtype(by_node, dtype)
        for place, agreement in zip(places, agreements, strict=True):
            senders = reports[place]
            memory = {} if not senders[0]["errors"][step] else {"errors": rows(senders, "errors", step, 0)}
            result = agreement.check(
                sums[:, place].reshape(NODES, -1), sent=rows(senders, "sent", step, 0), **memory
            )
            for report, shard in zip(senders, result.shards, strict=True):
                wanted = round_to_gradient_dtype(shard / (RANKS if average else 1), dtype)
                np.testing.assert_array_equal(report["output"][step].numpy(), wanted)
    assert all(len(set(report["nbytes"])) == 1 for report in reports), "buffers come back"


@pytest.mark.parametrize(
    ("options", "numel", "dtype", "average", "bad"),
    [*CASES, ({"bits": 4}, 1003, "fp32", True, None), ({"bits": 4}, 3, "fp32", False, None)],
)
def test_an_all_reduce_is_the_simulation_s(pool, options, numel, dtype, average, bad):
    reports = pool.run(exchange, "TwoHopAllReduce", options, numel, dtype, average, bad, world_size=RANKS)
    labels, chunk = labels_of(numel), NODES * -(-numel // RANKS)
    parts = [slice(start, min(start + chunk, numel)) for start in range(0, numel, chunk)]
    agreements = [
        AllReduceAgreement(
            NODES,
            part.stop - part.start,
            labels=None if labels is None else labels[part],
            gradient_dtype=dtype,
            **simulated(options),
        )
        for part in parts
    ]
    for step in range(STEPS):
        by_node = gradients(step, numel, dtype, bad).reshape(NODES, LOCAL, numel).sum(axis=1)
        sums, held = round_to_gradient_dtype(by_node, dtype), []
        for local, (part, agreement) in enumerate(zip(parts, agreements, strict=True)):
            senders = reports[local::LOCAL]
            sent = rows(senders, "sent", step, 0)[:, : part.stop - part.start]
            held.append(agreement.exchange(sums[:, part], sent=sent))
            errors = None
            if senders[0]["errors"][step]:
                errors = rows(senders, "errors", step, 0)[:, : part.stop - part.start]
            agreement.end_step(errors=errors)
        # A power of two as divisor changes no code.
        wanted = round_to_gradient_dtype(np.concatenate(held) / (RANKS if average else 1), dtype)
        for report in reports:
            np.testing.assert_array_equal(report["output"][step].numpy(), wanted)
    assert all(len(set(report["nbytes"])) == 1 for report in reports), "buffers come back"


def rows(reports: list[dict[str, Any]], name: str, step: int, sender: int) -> np.ndarray:
    return np.stack([report[name][step][sender].numpy() for report in reports])


def test_the_pool_keeps_no_more_buffers_than_were_in_use_at_a_time() -> None:
    import torch

    from megatron_patch.collectives.workspace import Workspace

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
