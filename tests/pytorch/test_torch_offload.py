"""`offload` under FSDP2 and DDP: a run goes on as the one that kept its errors on the device."""

from __future__ import annotations

from typing import Any

import pytest
from pytorch.runs import full
from pytorch.test_states import DDP, FLAT, HYBRID, LOCO, built, steps

import megatron_patch


def moved(how: dict[str, Any], offloads: bool) -> tuple[list[float], list[tuple[int, int]]]:
    """In a worker: the weights after five steps; (bytes on the device before, after) of each move."""
    model, optimizer = built(how, LOCO)
    held = []
    for step in range(5):
        steps(model, optimizer, step, step + 1)
        if offloads and step in (1, 3):
            before = megatron_patch.report(model).device_bytes
            megatron_patch.offload(model)
            held.append((before, megatron_patch.report(model).device_bytes))
    whole = [float(full(parameter).double().abs().sum()) for parameter in model.parameters()]
    megatron_patch.disable()
    return whole, held


@pytest.mark.parametrize("how", [FLAT, HYBRID, DDP], ids=lambda how: how["kind"])
def test_a_run_goes_on_as_if_nothing_had_been_moved(pool: Any, how: dict[str, Any]) -> None:
    stayed = pool.run(moved, how, False, world_size=4)
    for (weights, _), (again, held) in zip(stayed, pool.run(moved, how, True, world_size=4), strict=True):
        assert weights == again
        assert len(held) == 2
        for with_it, without in held:
            assert with_it > 1000
            assert without == 0
