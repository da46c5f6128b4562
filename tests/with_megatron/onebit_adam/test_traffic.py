"""What 1-bit Adam's all-reduce sends of a parameter; that this is what travels is in tests/collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from collectives.setups import setup_of

from megatron_patch.collectives.all_reduce import AllReduce
from megatron_patch.quantization.blocks import Contents

PARAMETERS = 2**22 + 5  # the last shard is shorter


def bits_of_momentum() -> float:
    """A rank's bits in both directions, for each parameter that it does not own."""
    setup = setup_of(method="onebit_adam", warmup_steps=1)
    exchange = AllReduce(Contents(PARAMETERS), dist.group.WORLD, setup)
    others = PARAMETERS * (dist.get_world_size() - 1) / dist.get_world_size()
    return 8 * exchange.traffic(torch.zeros(PARAMETERS)).between.nbytes / others


def test_momentum_costs_at_most_2_3_bits_a_parameter_both_directions_together(pool: Any) -> None:
    for bits in pool.run(bits_of_momentum, world_size=4):
        assert 2.25 < bits <= 2.3
