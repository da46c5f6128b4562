"""When compression starts by itself: Megatron's schedules, batches that grow, groups with rates of their own.

Megatron's own scheduler and calculators of microbatches say the rates; the expected step is found from the
rates alone, by the rule of docs/numerics.md.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from seeds import seeded
from with_megatron.seam_runs import built, logged

import megatron_patch
from megatron_patch.config import CompressionConfig
from megatron_patch.session.onset import Onset

AUTO = CompressionConfig()


def first_step(steps: list[list[float]], config: CompressionConfig = AUTO, resume_at: int = -1) -> int | None:
    """The step, from 1, whose gradients are the first to be compressed; `steps` has each one's rates."""
    onset = Onset.at(config, 0)
    for done, rates in enumerate(steps, start=1):
        if done - 1 == resume_at:
            onset = Onset(**vars(onset))
        may_start = onset.may_start(config, done - 1, [rates])
        onset.after_step(config, done, rates)
        if onset.started:
            assert may_start, "ranks read the answer of this step before the next pass"
            return done + 1
    return None


def by_the_rule(steps: list[list[float]]) -> int | None:
    """The second step of two in a row without any rate that rose, plus one."""
    for number in range(1, len(steps)):
        rates = zip(steps[number], steps[number - 1], strict=True)
        if all(now <= before or math.isclose(now, before, rel_tol=1e-9) for now, before in rates):
            return number + 2
    return None


def rates_of_megatron(style: str, warmup: int, batches: list[int], maxima: list[float]) -> list[list[float]]:
    """In a worker: the rates of each step by Megatron's scheduler, whose unit are samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    groups = [{"params": [], "max_lr": rate, "min_lr": 1e-5} for rate in maxima]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=max(maxima),
        min_lr=1e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=sum(batches),
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=sum(batches) // 10,
        lr_wsd_decay_style="linear",
    )
    found = []
    for batch in batches:
        found.append([group["lr"] for group in groups])
        scheduler.step(batch)
    return found


@pytest.mark.parametrize("style", ["cosine", "linear", "constant", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("grows", [False, True], ids=["same batch", "batch grows"])
def test_it_starts_after_the_warm_up_of_megatron_s_schedules(pool, style, grows):
    draw = random.Random(seeded(5))
    batch = 8
    batches = [batch * (1 + (step // 7 if grows else 0)) for step in range(200)]
    warm_up_steps = draw.randrange(5, 60)
    warmup = sum(batches[:warm_up_steps])
    (rates,) = pool.run(rates_of_megatron, style, warmup, batches, [1e-3, 3e-2], world_size=1)
    start = first_step(rates)
    assert start == by_the_rule(rates)
    # rates 1 to warm_up_steps + 1 rise; the next one shows that they do not any more
    assert start == warm_up_steps + 3
    assert all(now > before for now, before in zip(rates[warm_up_steps], rates[0], strict=True))


@pytest.mark.parametrize(
    ("rates", "start"),
    [
        ([[1e-3]] * 15, 12),  # constant: it might be the first stair of a warm-up
        ([[1e-3]] * 3 + [[2e-3]] * 3 + [[3e-3]] * 3 + [[4e-3]] * 9, 14),  # stairs of three steps
        ([[0.0]] * 4 + [[1e-3], [2e-3], [2e-3]], 8),  # a rate of zero is none
        ([[1e-3], [2e-3], [1.1e-3], [1.2e-3], [1.3e-3], [1.3e-3]], 7),  # resumed with half the peak
        ([[1e-3], [9e-4], [8e-4]], 3),  # falls from the first step on
        ([[1e-3], [1e-2], [1e-2]], 4),
        ([[1.0, 1e-3], [1.0, 2e-3], [0.5, 3e-3], [0.4, 3e-3]], 5),  # the other group still rises
        ([[0.0], [1e-3], [2e-3]], None),
        ([[], [], []], None),  # no group, no rate
    ],
)
def test_the_rule(rates, start):
    assert first_step(rates) == start
    for resume_at in range(1, 4):
        assert first_step(rates, resume_at=resume_at) == start, "a saved one goes the same way"


def test_a_schedule_resumed_without_our_state_waits_for_two_steps_that_do_not_rise():
    rising = [[1e-4 * step] for step in range(1, 30)]
    assert first_step(rising[10:] + [[2.9e-3]] * 3) == 19 + 2
    assert first_step([[3e-3 - 1e-4 * step] for step in range(10)]) == 3


def test_other_groups_than_before_say_nothing():
    onset = Onset()
    for rates in ([1e-3], [1e-3, 1e-3], [1e-3]):
        onset.after_step(AUTO, 1, rates)
        assert not onset.started


def test_all_optimizers_of_a_model_are_waited_for():
    """Stepped one by one in a step, or in turns, each with groups of its own."""
    onset = Onset()
    for step, (first, second) in enumerate([(1, 1), (2, 2), (2, 3)] + [(2, 4)] * 4, start=1):
        onset.after_step(AUTO, step, [first], 0)
        onset.after_another(step, [second, second], 1)
        assert onset.started == (step >= 6), step
    onset = Onset()
    for step, rate in enumerate([1, 1, 2, 2, 3, 3, 3, 3], start=1):  # each one's own rate rises three times
        onset.after_step(AUTO, step, [rate] * (1 + step % 2), step % 2)
        assert onset.started == (step >= 8), step


def test_what_has_started_stays_started():
    onset = Onset()
    for rate in (1e-3, 9e-4, 2e-3, 5e-3):  # a cycle
        onset.after_step(AUTO, 1, [rate])
    assert onset.started
    manifest = {"steps": 200, "onset": {"started": True, "rates": [[1e-3]]}}
    assert Onset.of_manifest(manifest, CompressionConfig(start_step=300)).started
    assert Onset.of_manifest(manifest, AUTO).started


def test_a_saved_one_that_has_not_started_starts_where_this_run_says():
    waiting = {"steps": 50, "onset": {"started": False, "rates": [[1e-3]]}}
    assert not Onset.of_manifest(waiting, AUTO).started
    assert Onset.of_manifest(waiting, CompressionConfig(start_step=50)).started
    assert not Onset.of_manifest(waiting, CompressionConfig(start_step=51)).started


# --- in an engine ----------------------------------------------------------------------------------------


def own_loop(kind: str, rates: list[float], options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: which steps were compressed in a loop of one's own that sets rates by itself."""
    if kind in ("chained", "one by one"):
        tiny, state = built({"dtypes": ("float32",), "experts": (0, 2)}, options)
    elif kind == "torch":
        tiny, state = built({"ddp": {"use_distributed_optimizer": False}}, options)
    else:
        tiny, state = built({"dtypes": ("float16",)} if kind == "fp16" else {}, options)
    optimizer = tiny.optimizer
    if kind == "torch":
        import torch

        for parameter in tiny.parameters:
            parameter.grad = parameter.main_grad
        optimizer = torch.optim.SGD(tiny.parameters, lr=0.0)
    compressed, steps, done = [], [], 0
    with logged() as lines:
        while done < len(rates):
            for group in optimizer.param_groups:
                group["lr"] = rates[done]
            gradients = tiny.random_gradients(len(steps))
            if kind == "fp16" and len(steps) in (2, 5):
                gradients = [gradient * float("inf") for gradient in gradients]
            tiny.exchange(gradients)
            if kind == "one by one":
                answers = [part.step() for part in optimizer.chained_optimizers]
            else:
                answers = [optimizer.step() or (True,)]
            done += bool(answers[0][0])
            compressed.append(state.report.compressed)
            steps.append((state.ledger.steps, state.ledger.steps_seen))
    report = megatron_patch.report(tiny.ddp)
    optimizers = len(state.ledger.onset.rates)
    megatron_patch.disable()
    return {
        "optimizers": optimizers,
        "compressed": compressed,
        "steps": steps,
        "lines": lines,
        "report": (report.step, report.compressed),
    }


RATES = [1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 3e-4, 2e-4]


@pytest.mark.parametrize("kind", ["plain", "chained", "one by one", "torch"])
def test_a_loop_of_one_s_own_starts_by_the_rates_that_it_sets(pool, kind):
    reports = pool.run(own_loop, kind, RATES, {"start_step": "auto"}, world_size=2)
    optimizers = 2 if kind == "one by one" else 1
    full = 4 + optimizers  # Two optimizers could step in turns: two steps without a rise are waited for.
    for rank, found in enumerate(reports):
        assert found["compressed"] == [False] * full + [True] * (7 - full)
        assert found["optimizers"] == optimizers  # Every manifest has their rates.
        assert found["steps"] == [(n, n) for n in range(1, 8)]
        assert found["report"] == (7, True)
        starts = [line for line in found["lines"] if "compression starts at step" in line]
        said = f"INFO: megatron-loco: compression starts at step {full + 1}"
        assert starts == ([said] if rank == 0 else [])


def test_skipped_steps_of_fp16_do_not_count(pool):
    """A scheduler stays where it is in a step that is skipped: the rate of the next one is the same."""
    for found in pool.run(own_loop, "fp16", RATES, {"start_step": "auto"}, world_size=2):
        assert found["compressed"] == [False] * 7 + [True] * 2
        assert found["steps"][-1] == (7, 9)
