"""The low-bit all-reduce on real process groups: both phases against the simulation, ragged shards too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collectives.test_reduce_scatter import gradient_of
from simulation.all_reduce_float64 import AllReduceAgreement

RANKS = 4
STEPS = 5


def all_reduce(options: dict[str, Any], numel: int, dtype: str, average: bool) -> dict[str, Any]:
    """Several all-reduces of one bucket: what was sent and remembered in both phases, what all ranks hold."""
    import torch
    import torch.distributed as dist
    from coded_values import coded_values, decoded
    from collectives.setups import setup_of

    from megatron_patch.collectives.all_reduce import AllReduce
    from megatron_patch.quantization.blocks import Contents

    rank, setup = dist.get_rank(), setup_of(**options)
    exchange = AllReduce(Contents(numel), dist.group.WORLD, setup)
    report: dict[str, Any] = {"sent": [], "errors": [], "owned": [], "owner_errors": [], "held": []}

    def record(sender: Any, name: str) -> None:
        compress = sender.compress

        def compress_and_keep(gradient: torch.Tensor, payload: torch.Tensor) -> None:
            compress(gradient, payload)
            sent = coded_values(sender.layout, decoded(sender, payload))
            report[name].append(sent[: sender.layout.numel])

        sender.compress = compress_and_keep

    record(exchange.sender, "sent")
    record(exchange.owner, "owned")
    report["nbytes"] = []
    for step in range(STEPS):
        data = torch.from_numpy(gradient_of(rank, step, numel)).to(getattr(torch, dtype))
        handle = exchange.start(data, data, average)
        if step % 2:
            handle.advance()
            handle.advance()
            assert len(report["owned"]) == step + 1, "the second half has begun"
        handle.wait()
        handle.wait()  # once only
        report["held"].append(data.float())
        report["nbytes"].append(setup.workspace.nbytes)
        for name, sender in (("errors", exchange.sender), ("owner_errors", exchange.owner)):
            if sender.error is not None:
                report[name].append(coded_values(sender.layout, sender.error.decode())[: sender.layout.numel])
    return report


@pytest.mark.parametrize(
    ("options", "numel", "dtype", "average"),
    [
        ({"bits": 4}, 1096, "float32", False),
        ({"bits": 4}, 1001, "bfloat16", True),
        ({"bits": 8, "block_size": 64}, 777, "float32", True),
        ({"bits": 2, "error_beta": 0.5, "error_dtype": "fp32"}, 1003, "float16", False),
        ({"bits": 1, "error_dtype": "bf16"}, 1001, "float32", True),
        ({"bits": 1, "block_size": "shard"}, 1001, "float32", False),
        ({"bits": 4, "method": "naive"}, 300, "float32", False),
        ({"bits": 4, "block_size": 16}, 5, "float32", True),  # shards of 2, 2, 1 and 0 elements
    ],
)
def test_both_phases_and_what_every_rank_holds(pool, options, numel, dtype, average):
    reports = pool.run(all_reduce, options, numel, dtype, average)
    memory = options.get("method") != "naive"
    agreement = AllReduceAgreement(
        RANKS,
        numel,
        bits=options["bits"],
        block_size=options.get("block_size", 128),
        beta=options.get("error_beta", 0.8),
        error_dtype=options.get("error_dtype", "int8"),
        memory=memory,
        average=average,
        gradient_dtype={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype],
    )
    owners = range(len(agreement.owners))  # an empty shard has none
    for step in range(STEPS):
        held = agreement.exchange(
            np.stack([gradient_of(rank, step, numel) for rank in range(RANKS)]),
            sent=np.stack([report["sent"][step].numpy() for report in reports]),
            owned=[reports[owner]["owned"][step].numpy() for owner in owners],
        )
        agreement.end_step(
            errors=np.stack([report["errors"][step].numpy() for report in reports]) if memory else None,
            owner_errors=[reports[owner]["owner_errors"][step].numpy() for owner in owners]
            if memory
            else None,
        )
        for report in reports:
            assert np.array_equal(report["held"][step].numpy(), held)
            assert len(set(report["nbytes"])) == 1, "buffers come back"
