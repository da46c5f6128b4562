"""Turns between Megatron's gather of weights and the exact one: no bit of the training changes."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from with_megatron.seam_runs import REPLICATED, built, logged, refusal
from with_megatron.seams.test_weights import CASES, GATHERED, bf16
from with_megatron.weight_runs import differences, unused_module, weight_run

import megatron_patch
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.megatron.seams.traffic import stock_because
from megatron_patch.session import trial

LASTING = {"FIRST": 2, "FEWEST": 99, "MOST": 99}
"""A trial that does not end."""
BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}
ONE_ROUND = {"FIRST": 3, "FEWEST": 1, "MOST": 1}


def with_turns(
    model: dict[str, Any], method: dict[str, Any], steps: int, around: str, turns: list[dict[str, int]]
) -> Any:
    """The same training with Megatron's own gather, and with each of these turns."""
    options = {"method": "none", **method}
    found = [weight_run(model, options | {"weight_gather": "stock"}, steps, around)]
    for settings in turns:
        with mock.patch.multiple(trial, **settings):
            found.append(weight_run(model, options | {"weight_gather": "auto"}, steps, around))
    return found


def check(
    pool: Any, case: tuple[int, dict[str, Any], dict[str, Any], str], steps: int, *turns: dict[str, int]
) -> None:
    ranks, model, method, around = case
    for stock, *others in pool.run(with_turns, model, method, steps, around, list(turns), world_size=ranks):
        for auto in others:
            assert differences(stock, auto) == []
            assert auto["raw"]["off"] >= 3, auto["raw"]
            assert any(0 < bits < 15.9 for bits in auto["bits"]), "messages were sent, too"


@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_the_training_changes(pool, case):
    """With turns of one, two and three steps."""
    check(pool, CASES[case], 20, LASTING | {"BLOCK": 1}, LASTING, ONE_ROUND | {"BLOCK": 3})


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [{}, GATHERED], ids=["at-once", "overlap"])
@pytest.mark.parametrize("experts", [{}, {"experts": 4, "ep": 2}], ids=["dense", "experts"])
def test_no_bit_of_the_training_changes_in_200_steps(pool, experts, overlap):
    check(pool, (4, bf16(experts, **overlap), {}, "evaluations"), 200, LASTING)


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


def on_clocks_of_their_own(folder: str) -> list[Any]:
    """In a worker: what ranks decide whose clocks disagree, and go on with after a resume."""
    options = {"method": "loco", "bits": 4, "start_step": 0, "weight_gather": "auto"}
    clock, found = [0.0], []

    def now(turns: trial.Trial) -> float:
        # On rank 0 the exact gather is slower; but rank 1, where it is faster, is the slowest without it.
        exact = session.choice.weights
        clock[0] += (1.6 - 0.8 * exact) if dist.get_rank() else (1 + 0.3 * exact)
        return clock[0]

    with mock.patch.multiple(trial, FIRST=2, FEWEST=2, MOST=2), mock.patch.object(trial.Trial, "_now", now):
        tiny, session = built(BF16, options)
        for step in range(20):
            tiny.step(tiny.random_gradients(step))
        found.append(dataclasses.asdict(session.kept))
        dcp.save(megatron_patch.state_dict(tiny.ddp), checkpoint_id=folder)
    megatron_patch.disable()
    again, session = built(BF16, options)
    reader = dcp.FileSystemReader(folder)
    room = megatron_patch.state_dict(again.ddp, reader=reader)
    dcp.load(room, storage_reader=reader)
    megatron_patch.load_state_dict(again.ddp, room)
    again.step(again.random_gradients(0))
    return [*found, dataclasses.asdict(session.kept), session.choice.weights]


def test_all_ranks_decide_alike_and_a_resumed_job_keeps_the_decision(pool, tmp_path):
    found = pool.run(on_clocks_of_their_own, str(tmp_path))
    assert all(ranks == found[0] for ranks in found)
    decided, resumed, weights = found[0]
    assert decided == resumed
    assert decided["weights"] is weights is True
    assert decided["spent"] == 16
    assert decided["bits"] > 0


@pytest.mark.parametrize(
    ("device", "gather", "served"), [("cpu", "auto", True), ("cuda", "exact", True), ("cuda", "auto", False)]
)
def test_weights_that_a_script_may_edit_take_no_turns(device, gather, served):
    """On a GPU an edit before an overlapped gather is found when its message was decoded: the job ends."""
    weights = SimpleNamespace(dtype=torch.bfloat16, device=torch.device(device))
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_param_gather=True),
        intra_distributed_optimizer_instance_group=SimpleNamespace(size=lambda: 4),
        buckets=[SimpleNamespace(param_data=weights)],
    )
    why = stock_because(group, CompressionConfig(method="none", weight_gather=gather))
    assert (why is None) == served
    assert served or why.startswith("no turns with overlap_param_gather on a GPU")


def with_kernels_that_fail_on_a_rank() -> tuple[list[str], set[bool]]:
    """In a worker: what is said at the start, and the weight gathers of 20 steps."""
    from megatron_patch.megatron import attach

    broken = mock.patch.object(attach, "try_kernels", side_effect=UserError("they decode other weights"))
    with mock.patch.multiple(trial, **LASTING), logged() as lines:
        with broken if dist.get_rank() == 1 else contextlib.nullcontext():
            tiny, session = built(BF16, {"method": "none", "weight_gather": "auto"})
        chosen = set()
        for step in range(20):
            tiny.step(tiny.random_gradients(step))
            chosen.add(session.choice.weights)
    return [line for line in lines if "no turns" in line], chosen


def test_kernels_that_fail_on_a_rank_end_no_job(pool):
    said, chosen = zip(*pool.run(with_kernels_that_fail_on_a_rank), strict=True)
    line = "WARNING: megatron-loco: no turns of the exact weight gather: they decode other weights"
    assert list(said) == [[], [line], [], []]
    assert list(chosen) == [{False}] * 4


def with_an_optimizer_of_torch() -> str:
    """In a worker: what its step says of a trial."""
    tiny, _ = built(REPLICATED, {"method": "loco", "start_step": 0, "trial": 48})
    for parameter in tiny.parameters:
        parameter.grad = torch.zeros_like(parameter)
    tiny.exchange(tiny.random_gradients(0))
    return refusal(torch.optim.SGD(tiny.parameters, lr=0.1).step)


def test_a_trial_is_refused_with_optimizers_that_ranks_step_as_they_like(pool):
    for said in pool.run(with_an_optimizer_of_torch):
        assert said.startswith(
            "compression.trial takes turns of Megatron's own optimizers, and this model's is torch"
        )
        assert "\n" not in said
