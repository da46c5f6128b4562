"""1-bit Adam goes on from a checkpoint: exactly in both phases and over the switch.

What must come back is the phase, the senders' and the owners' errors, and Adam's own state, which is
Megatron's to save; momentum is made of that.
The engine's checkpoints are resumed in test_resume.py, other layouts are in test_save_restore.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from coded_values import flat_error
from with_megatron.seam_runs import REPLICATED, attachment_of, leaves_of
from with_megatron.tiny_model import build

import megatron_patch
from megatron_patch.session.states import Saved, apply, pack

OVERLAP = {"overlap": True, "bucket_size": 400}
RANKS = 4
CUTS = (-5, 0, 3)
"""Checkpoints, in steps after the switch."""
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.8}
"""The variance forgets in 5 steps."""
# name: (model, compression, the step of the switch)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "distributed, fixed": (OVERLAP, {"warmup_steps": 6}, 6),
    "replicated, auto": (REPLICATED, {}, 10),
}


def start(model: dict[str, Any], compression: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """(tiny model, its attachment)."""
    optimizer = ADAM | model.get("optimizer", {})
    tiny = build(**{**model, "optimizer": optimizer, "seed": seed})
    options = {"error_dtype": "fp32", **compression}
    megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(method="onebit_adam", **options))
    return tiny, attachment_of(tiny.ddp)


def step_of(tiny: Any, step: int, overflow: int) -> None:
    """One step; the rate rises for 4, and gradients repeat: the variance settles. NaN at `overflow`."""
    for group in tiny.optimizer.param_groups:
        group["lr"] = ADAM["lr"] * min((step + 1) / 4, 1 - step / 100)
        group["weight_decay"] = ADAM["weight_decay"] * group["wd_mult"]
    tiny.optimizer.zero_grad()
    tiny.step([g * float("nan" if step == overflow else 1) for g in tiny.random_gradients(step % 5)])


def state_of(tiny: Any, attachment: Any) -> dict[str, Any]:
    """Copies of everything that the next step depends on."""
    compressor = attachment.session
    adam = [part.optimizer for part in leaves_of(tiny.optimizer)]
    found = {
        "weights": [parameter.detach() for parameter in tiny.parameters],
        "main weights": [p.detach() for a in adam for group in a.param_groups for p in group["params"]],
        "adam": [a.state_dict() for a in adam],
        "errors": [flat_error(s.error) for s in compressor.senders if s.error is not None],
        "momentum": [held for seam in attachment.seams for held in seam.momentum.held or ()],
        "phase": compressor.ledger.phase,
        "counts": (compressor.ledger.steps, compressor.ledger.steps_seen, compressor.ledger.events),
    }
    return copy.deepcopy(found)


def _put_back(tiny: Any, state: dict[str, Any]) -> None:
    """What Megatron's checkpoint would."""
    adam = [part.optimizer for part in leaves_of(tiny.optimizer)]
    main = [p for a in adam for group in a.param_groups for p in group["params"]]
    with torch.no_grad():
        for parameters, values in ((tiny.parameters, state["weights"]), (main, state["main weights"])):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
    for a, saved in zip(adam, state["adam"], strict=True):
        a.load_state_dict(copy.deepcopy(saved))


def resume(model: dict[str, Any], compression: dict[str, Any], switch: int) -> dict[str, Any]:
    """In a worker: a run left alone, saved before and after the switch, and one from every checkpoint."""
    from megatron_patch.megatron.checkpoint.states import rank_state_of

    tiny, attachment = start(model, compression, seed=1234)
    kept: dict[int, tuple[dict[str, Any], tuple[str, Any]]] = {}
    steps = switch + CUTS[-1] + 3
    for step in range(steps):
        if step - switch in CUTS:
            kept[step] = state_of(tiny, attachment), pack(rank_state_of([tiny.ddp]), 1.0)
        step_of(tiny, step, switch + CUTS[-1])
    whole = state_of(tiny, attachment)
    megatron_patch.disable()

    different = {}
    for cut, (state, (manifest, data)) in kept.items():
        tiny, attachment = start(model, compression, seed=99)
        _put_back(tiny, state)
        rank = rank_state_of([tiny.ddp])
        rank.start_from_zero(cut)
        ranks = range(torch.distributed.get_world_size())
        told = apply(rank, Saved(ranks, lambda _, m=manifest: m, lambda _, d=data: d), 1.0)
        assert told == "error states restored exactly"
        for step in range(cut, steps):
            step_of(tiny, step, switch + CUTS[-1])
        again = state_of(tiny, attachment)
        different[cut - switch] = [name for name in whole if not equal(whole[name], again[name])]
        megatron_patch.disable()
    errors = sum(float(error.abs().sum()) for error in whole["errors"])
    return {"different": different, "phase": whole["phase"], "errors": errors}


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through lists and dictionaries."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_undisturbed_one(pool: Any, name: str) -> None:
    """Saved in the warm-up, as it ends, and in the compressed phase, right before a step with NaN."""
    model, compression, switch = CASES[name]
    for report in pool.run(resume, model, compression, switch, world_size=RANKS):
        phase = report["phase"]
        assert (phase.switch_step, phase.variance_steps) == (switch, switch)
        assert report["different"] == {cut: [] for cut in CUTS}
        assert report["errors"] > 0
