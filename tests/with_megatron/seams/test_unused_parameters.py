"""A parameter, or a row of one, whose gradient is always zero stays where it is, in every exchange.

With a code that cannot say zero, what a neighbour in its block sends would move it, and Adam makes a full
step of whatever it gets.
"""

from __future__ import annotations

from typing import Any

import pytest

RANKS, STEPS = 4, 6
REPLICATED = {"ddp": {"use_distributed_optimizer": False}, "optimizer": {"use_distributed_optimizer": False}}


def trained(model: dict[str, Any], compression: dict[str, Any]) -> list[Any]:
    """In a worker: for every parameter how far its elements moved; the second gets no gradient, nor do two
    rows of the first."""
    from with_megatron.tiny_model import build

    import megatron_patch

    tiny = build(**model)
    megatron_patch.attach(
        [tiny.ddp], megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    )
    before = [parameter.detach().clone() for parameter in tiny.parameters]
    for step in range(STEPS):
        gradients = tiny.random_gradients(step)
        gradients = [gradient + 1e-3 for gradient in gradients]
        gradients[0][[0, 7]] = 0
        gradients[1].zero_()
        tiny.step(gradients)
    if "ddp" not in model:
        tiny.ddp.start_param_sync(force_sync=True)
    megatron_patch.disable()
    return [(parameter.detach() - old).abs() for parameter, old in zip(tiny.parameters, before, strict=True)]


@pytest.mark.parametrize("bits", [4, 2, 1])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"overlap": True, "bucket_size": 300}, {"method": "naive"}),
        ({"instances": 2}, {}),
        ({}, {"ranks_per_node": 2}),
        (REPLICATED, {}),
        (REPLICATED, {"ranks_per_node": 2}),
    ],
    ids=["flat", "buckets", "instances", "two-hops", "all-reduce", "two-hop-all-reduce"],
)
def test_what_has_no_gradient_does_not_move(pool, model, options, bits):
    for moved in pool.run(trained, model, {"bits": bits, **options}, world_size=RANKS):
        assert not moved[1].any()
        assert not moved[0][[0, 7]].any()
        assert moved[0][1].any()
        assert moved[4].any()


@pytest.mark.parametrize("model", [{}, REPLICATED], ids=["sharded", "replicated"])
def test_nor_in_one_bit_adam(pool, model):
    options = {"method": "onebit_adam", "warmup_steps": 2}
    for moved in pool.run(trained, model, options, world_size=RANKS):
        assert not moved[1].any()
        assert not moved[0][[0, 7]].any()
        assert moved[4].any()
