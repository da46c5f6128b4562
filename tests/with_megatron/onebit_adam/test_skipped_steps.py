"""1-bit Adam where nothing may change: NaN and Inf, parameters without gradients; and what it refuses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from with_megatron.onebit_adam.test_onebit_resume import equal, start, state_of
from with_megatron.seam_runs import REPLICATED, events_of, leaves_of, refusal

from megatron_patch import UserError
from megatron_patch.megatron.unsupported import refuse_flags

EXPERTS = {"experts": (1, 4), "expert_parallel": 2, "overlap": True}
WARMUP = 2
SCALE = 2.0**12
FP16 = {"initial_loss_scale": SCALE, "min_loss_scale": 1.0, "hysteresis": 1, "loss_scale_window": 1000}


def bad_gradients(model: dict[str, Any]) -> dict[str, Any]:
    """In a worker: good steps, and between them steps with one element of one rank not finite."""
    tiny, attachment = start(model, {"warmup_steps": WARMUP}, seed=1234)
    compressor, rank = attachment.session, torch.distributed.get_rank()
    wrong: list[str] = []
    bad = [(3, 0, 7, "nan"), (5, 2, 0, "inf"), (7, 4, 300, "-inf")]  # step, parameter, element, value
    for step in range(9):
        scale = tiny.optimizer.get_loss_scale().item()
        gradients = [g * scale for g in tiny.random_gradients(step)]
        found = [(index, element, value) for at, index, element, value in bad if at == step]
        for index, element, value in found:
            if rank == step % 4:
                gradients[index].view(-1)[element] = float(value)
        tiny.optimizer.zero_grad()
        tiny.exchange(gradients)
        before = state_of(tiny, attachment)
        successful, _, _ = tiny.optimizer.step()
        after = state_of(tiny, attachment)
        scales = [part.get_loss_scale().item() for part in leaves_of(tiny.optimizer)]
        names = ("weights", "main weights", "adam", "errors")
        changed = [name for name in names if not equal(before[name], after[name])]
        dropped = scales == [scale / 2] * len(scales)
        if successful == bool(found):
            wrong.append(f"{step}: {'made' if successful else 'skipped'}")
        if found:
            wrong += [f"{step}: changed {name}" for name in changed]
            if not equal(before["momentum"], after["momentum"]):
                wrong.append(f"{step}: changed momentum")
            if dropped != ("float16" in model.get("dtypes", ())):
                wrong.append(f"{step}: scales {scales}")
        elif changed[:1] != ["weights"] or (step >= WARMUP) != ("errors" in changed):
            wrong.append(f"{step}: a good step changed {changed}")
        if not all(bool(weights.isfinite().all()) for weights in after["weights"]):
            wrong.append(f"{step}: weights are not finite")
    return {"wrong": wrong, "events": events_of(compressor)}


@pytest.mark.parametrize(
    "model",
    [{}, REPLICATED, EXPERTS, {"dtypes": ("float16",), "optimizer": FP16}],
    ids=["distributed", "replicated", "experts", "fp16"],
)
def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing(pool: Any, model: Any) -> None:
    for report in pool.run(bad_gradients, model):
        assert report["wrong"] == []
        assert (report["events"]["steps"], report["events"]["skipped_steps"]) == (6, 3)


def refused(model: dict[str, Any], settings: dict[str, Any]) -> str:
    """In a worker: what attaching a model and making a step says; `settings` go into its optimizer's."""

    def step() -> None:
        tiny, _ = start(model, {"warmup_steps": 5}, 1)
        for name, value in settings.items():
            setattr(tiny.optimizer.config, name, value)
        tiny.step(tiny.random_gradients(0))

    return refusal(step)


SGD = {"ddp": REPLICATED["ddp"], "optimizer": {**REPLICATED["optimizer"], "optimizer": "sgd"}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "num_distributed_optimizer_instances": ({"instances": 2}, {}, 2),
    "use_precision_aware_optimizer": ({}, {"use_precision_aware_optimizer": True}, True),
    "optimizer": (SGD, {}, "sgd"),
    "decoupled_weight_decay": ({"optimizer": {"decoupled_weight_decay": False}}, {}, False),
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_it_cannot_serve_is_refused_in_one_line(pool: Any, option: str) -> None:
    """By every rank's model, and before that by the command line, from Megatron's flags."""
    model, settings, value = REFUSED[option]
    flags = Namespace(**{"compression_method": "onebit_adam", "weight_decay": 0.1, option: value})
    with pytest.raises(UserError) as error:
        refuse_flags(flags)
    for line in (str(error.value), *pool.run(refused, model, settings)):
        shown = "SGD" if option == "optimizer" and line != str(error.value) else value
        assert line.startswith(f"megatron.{option}: {shown!r} cannot be combined with")
        assert "onebit_adam" in line
        assert "\n" not in line
    refuse_flags(Namespace(**{**vars(flags), "compression_method": "none", "optimizer": "adam"}))
