"""A parameter, or a row of one, whose gradient is always zero stays where it is, in every exchange.

With a code that cannot say zero, what a neighbour in its block sends would move it, and Adam makes a full
step of whatever it gets.
"""

from __future__ import annotations

from typing import Any

import pytest
from with_megatron.seam_runs import REPLICATED, built

STEPS = 6
ONEBIT = {"method": "onebit_adam", "warmup_steps": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flat": ({}, {"bits": 1}),
    "buckets": ({"overlap": True, "bucket_size": 300}, {"bits": 4, "method": "naive"}),
    "experts": ({"experts": (1, 4), "expert_parallel": 2}, {"bits": 2, "error_beta": 0.5}),
    "instances": ({"instances": 2}, {"bits": 2}),
    "two hops": ({}, {"bits": 4, "ranks_per_node": 2}),
    "all-reduce": (REPLICATED, {"bits": 1}),
    "two-hop all-reduce": (REPLICATED, {"bits": 2, "ranks_per_node": 2}),
    "onebit_adam": ({}, ONEBIT),
    "onebit_adam, all-reduce": (REPLICATED, ONEBIT),
}


def trained(model: dict[str, Any], compression: dict[str, Any]) -> list[Any]:
    """In a worker: for every parameter how far its elements moved; the second gets no gradient, nor do two
    rows of the first. Errors are reset on the way."""
    tiny, _ = built(model, {"reset_interval": 4} | compression)
    before = [parameter.detach().clone() for parameter in tiny.parameters]
    for step in range(STEPS):
        gradients = [gradient + 1e-3 for gradient in tiny.random_gradients(step)]
        gradients[0][[0, 7]] = 0
        gradients[1].zero_()
        tiny.step(gradients)
    if "ddp" not in model:
        tiny.ddp.start_param_sync(force_sync=True)
    return [(parameter.detach() - old).abs() for parameter, old in zip(tiny.parameters, before, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_gradient_does_not_move(pool, case):
    for moved in pool.run(trained, *CASES[case], world_size=4):
        assert not moved[1].any()
        assert not moved[0][[0, 7]].any()
        assert moved[0][1].any() or "onebit" in case  # A row may be rare to 1-bit Adam.
        assert moved[4].any()
