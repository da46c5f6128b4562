"""Turns between Megatron's gather of weights and the exact one: no bit of the training changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from with_megatron.seams.test_weights import CASES, GATHERED, bf16
from with_megatron.weight_runs import differences, unused_module, weight_run

from megatron_patch.session import trial

LASTING = {"FIRST": 2, "FEWEST": 99, "MOST": 99}
"""A trial that does not end."""
ONE_ROUND = {"FIRST": 3, "FEWEST": 1, "MOST": 1}


def with_turns(model: dict[str, Any], method: dict[str, Any], steps: int, around: str) -> Any:
    """The same training with Megatron's own gather, and with turns of one, two and three steps."""
    options = {"method": "none", **method}
    found = [weight_run(model, options | {"weight_gather": "stock"}, steps, around)]
    for settings in (LASTING | {"BLOCK": 1}, LASTING, ONE_ROUND | {"BLOCK": 3}):
        with mock.patch.multiple(trial, **settings):
            found.append(weight_run(model, options | {"weight_gather": "auto"}, steps, around))
    return found


def check(pool: Any, case: tuple[int, dict[str, Any], dict[str, Any], str], steps: int) -> None:
    ranks, model, method, around = case
    for stock, *others in pool.run(with_turns, model, method, steps, around, world_size=ranks):
        for auto in others:
            assert differences(stock, auto) == []
            assert auto["raw"]["off"] >= 3, auto["raw"]
            assert any(0 < bits < 15.9 for bits in auto["bits"]), "messages were sent, too"


@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_the_training_changes(pool, case):
    check(pool, CASES[case], 20)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [{}, GATHERED], ids=["at-once", "overlap"])
@pytest.mark.parametrize("experts", [{}, {"experts": 4, "ep": 2}], ids=["dense", "experts"])
def test_no_bit_of_the_training_changes_in_200_steps(pool, experts, overlap):
    check(pool, (4, bf16(experts, **overlap), {}, "evaluations"), 200)


def unused(steps: int) -> Any:
    found = [unused_module("stock", steps)]
    for block in (1, 3):
        with mock.patch.multiple(trial, **LASTING, BLOCK=block):
            found.append(unused_module("auto", steps))
    return found


def test_a_module_that_steps_leave_out_is_remembered_only_when_it_was_gathered(pool):
    for stock, *others in pool.run(unused, 24):
        for auto in others:
            assert stock["losses"] == auto["losses"]
            assert all(map(np.array_equal, stock["behind"], auto["behind"]))
