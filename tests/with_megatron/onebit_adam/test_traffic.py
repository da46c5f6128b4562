"""1-bit Adam's all-reduce on the wire: what the loopback interface counts as momentum goes both ways."""

from __future__ import annotations

from typing import Any

import pytest
from collectives.setups import loopback_bytes
from seeds import seeded

PARAMETERS = 2**22 + 5  # the last shard is shorter


def momentum_bytes(numel: int, tries: int) -> dict[str, Any]:
    """What the interface counts in one exchange of all ranks, the least of several."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.all_reduce import AllReduce
    from megatron_patch.quantization.blocks import Contents

    exchange = AllReduce(Contents(numel), dist.group.WORLD, setup_of(method="onebit_adam", warmup_steps=1))
    momentum = torch.randn(numel, generator=torch.Generator().manual_seed(seeded(dist.get_rank())))
    counted = []
    for _ in range(tries):  # other processes use the loopback interface too: the least count is ours
        held = momentum.clone()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        exchange.start(held, held, average=True).wait()
        dist.barrier()
        counted.append(loopback_bytes() - before)
        dist.barrier()
    return {"counted": min(counted), "payload": exchange.sender.layout.payload_bytes, "held": held}


@pytest.mark.alone
def test_momentum_costs_at_most_2_3_bits_a_parameter_both_directions_together(pool: Any) -> None:
    ranks = 4
    reports = pool.run(momentum_bytes, PARAMETERS, tries=4, world_size=ranks)
    counted = min(report["counted"] for report in reports)
    # To every owner and back; what a rank owns itself does not travel.
    assert counted == pytest.approx(2 * ranks * (ranks - 1) * reports[0]["payload"], rel=0.05)
    bits_per_parameter = 8 * counted / ((ranks - 1) * PARAMETERS)
    assert 2.25 < bits_per_parameter <= 2.3
    for report in reports[1:]:
        assert report["held"].equal(reports[0]["held"])
    assert reports[0]["held"].abs().min() > 0
