"""Gradients that go bad: NaN and Inf in any place of any bucket.

On Megatron's real DDP, buckets and optimizers (tiny_model.py), 4 ranks, through every exchange there is: the
distributed optimizer's reduce-scatter, two instances of it, the replicated optimizer's all-reduce, experts.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from with_megatron.seam_runs import built, events_of

RANKS = 4
BLOCK = 64
EXCHANGES: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "experts": {"experts": (1, 4), "expert_parallel": 2, "overlap": True},
    "instances": {"instances": 2},
    "all-reduce": {"ddp": {"use_distributed_optimizer": False}},
}


def errors_of(session: Any) -> list[Any]:
    """decode(e) of every sender and owner, flat."""
    return [sender.layout.flat(sender.error.decode()).clone() for sender in session.senders]


def place_of(tiny: Any, number: int) -> tuple[int, int, float]:
    """(parameter, element of it, value that is not finite): the first, the last or any element of a bucket.

    The first element is in a bucket's first block, the last one in its last and short block. Nine
    numbers for every bucket give each of these places each value.
    """
    bucket = tiny.buckets[number // 9]
    numel = max(end for _, end in bucket.param_to_index.values())
    element = [0, numel - 1, random.Random(number).randrange(numel)][number % 3]
    parameters = {id(parameter): index for index, parameter in enumerate(tiny.parameters)}
    # Padding between parameters is nobody's: the last element of the one before it stands in for it.
    parameter, (start, end) = max(
        (item for item in bucket.param_to_index.items() if item[1][0] <= element), key=lambda item: item[1]
    )
    value = [float("nan"), float("inf"), -float("inf")][number // 3 % 3]
    return parameters[id(parameter)], min(element, end - 1) - start, value


def skipped_steps(model: dict[str, Any]) -> dict[str, Any]:
    """fp16 with a dynamic loss scale: every other step one element of one rank is not finite."""
    scaling = {"initial_loss_scale": 2.0**12, "min_loss_scale": 1.0, "loss_scale_window": 1, "hysteresis": 1}
    tiny, compressor = built(model | {"dtypes": ("float16",), "optimizer": scaling}, {"block_size": BLOCK})
    rank, parts, scale = torch.distributed.get_rank(), tiny.optimizer.chained_optimizers, 2.0**12
    injections = 9 * len(tiny.buckets)
    wrong: list[str] = []
    for step in range(injections):
        for poisoned in (False, True):
            for part in parts:
                part.grad_scaler._scale.fill_(scale)
            gradients = [g * 2.0**-6 * scale for g in tiny.random_gradients(2 * step + poisoned)]
            if poisoned:
                index, element, value = place_of(tiny, step)
                if step % RANKS == rank:
                    gradients[index].view(-1)[element] = value
            weights = tiny.weights()
            tiny.exchange(gradients)
            kept = errors_of(compressor)
            successful, _, _ = tiny.optimizer.step()
            # Megatron scales a chained optimizer's parts (dense, experts) apart: the one that saw it drops.
            after = [part.get_loss_scale().item() for part in parts]
            errors = errors_of(compressor)
            facts = {
                "the step is skipped": successful != poisoned,
                "the scale drops": (min(after) == scale / 2) == poisoned,
                "weights": torch.equal(weights, tiny.weights()) == poisoned,
                "the exchange poisons no error": all(bool(e.isfinite().all()) for e in kept),
                "errors start again": any(bool(e.any()) for e in errors) != poisoned,
            }
            wrong += [
                f"{step}, {'bad' if poisoned else 'good'}: {name}" for name, so in facts.items() if not so
            ]
    return {"wrong": wrong, "events": events_of(compressor), "injections": injections}


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_every_rank_skips_the_step_and_drops_the_scale_in_fp16(pool, exchange):
    for report in pool.run(skipped_steps, EXCHANGES[exchange]):
        assert report["wrong"] == []
        assert report["events"]["skipped_steps"] == report["events"]["steps"] == report["injections"] >= 9


def checked() -> None:
    tiny, _ = built({"ddp": {"check_for_nan_in_grad": True}}, {})
    gradients = tiny.random_gradients(0)
    gradients[2][1, 1] = float("nan")
    with pytest.raises(Exception, match="NaN in local grad norm"):
        tiny.exchange(gradients)
    torch.distributed.barrier()


def test_megatron_s_check_of_the_local_gradient_still_comes_first(pool):
    pool.run(checked)
