"""Whose step it is: which chunks a Megatron optimizer updates, chained or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from with_megatron.seam_runs import attach, built, core_before, errors_of, session_of
from with_megatron.tiny_model import build

import megatron_patch
from megatron_patch.megatron.seams.optimizer_step import leaves_of, updates


def test_a_rank_that_owns_no_parameter_of_a_chunk_steps_it_too():
    """A layer-wise optimizer gives whole parameters to ranks, and to some none."""
    chunk = SimpleNamespace(param_to_bucket_group={})
    empty = SimpleNamespace(float16_groups=[], fp32_from_fp32_groups=[])
    layer_wise = SimpleNamespace(chained_optimizers=[empty], model_chunks=[chunk])
    assert updates(layer_wise, chunk)
    assert not updates(layer_wise, SimpleNamespace(param_to_bucket_group={}))


def test_a_chain_in_a_chain_is_stepped_part_by_part():
    muon, adam, rest = (SimpleNamespace(name=name) for name in ("muon", "adam", "rest"))
    layer_wise = SimpleNamespace(chained_optimizers=[muon, adam])
    assert leaves_of(SimpleNamespace(chained_optimizers=[layer_wise, rest])) == [muon, adam, rest]
    assert leaves_of(rest) == [rest]


SCALING = {"initial_loss_scale": 256.0, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1.0}
HALF = {"dtypes": ("float16",), "grad_reduce_in_fp32": False, "optimizer": SCALING}
needs_mimo = pytest.mark.skipif(
    core_before("0.18"), reason="this Megatron has no optimizer that steps others by halves"
)


def by_halves(whole: bool, overflows: tuple[int, ...], own_overflow: bool) -> dict[str, Any]:
    """In a worker: fp16 steps of two models, whole or by halves; an overflow in one of them."""
    tiny, other = build(**HALF), build(**HALF)
    attach([tiny.ddp, other.ddp], {"weight_gather": "exact"})
    state = session_of(tiny.ddp)
    if not whole:
        from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo

        optimizers = {"a": tiny.optimizer, "b": other.optimizer}
        infos = {name: ModuleOptimizerInfo(one, None, None, True) for name, one in optimizers.items()}
        both = MimoOptimizer(infos, tiny.optimizer.config)
    scales, skipped, errors, weights = [], [], [], []
    for step in range(7):
        for one in (tiny, other):
            gradients = one.random_gradients(step)
            if step in overflows and (one is tiny) == own_overflow:
                gradients[0][0, 0] = torch.inf
            one.exchange([1e-2 * gradient for gradient in gradients])
        for optimizer in (tiny.optimizer, other.optimizer) if whole else (both,):
            optimizer.step()
        scales.append(float(tiny.optimizer.get_loss_scale()))
        skipped.append(state.ledger.events.skipped_steps)
        errors.append(float(sum(abs(error).sum() for error in errors_of(state))))
        weights.append(megatron_patch.report(tiny.ddp).weight_bytes)
    tiny.exchange(tiny.random_gradients(9))  # which ends a step that another model's overflow has skipped
    return {
        "scales": scales,
        "skipped": skipped,
        "ended": state.ledger.events.skipped_steps,
        "replays": state.ledger.events.replays,
        "errors": errors,
        "weight bytes": weights,
        "weights": tiny.weights().tolist(),
        "steps": state.ledger.steps,
    }


@needs_mimo
def test_halves_of_steps_are_steps(pool: Any) -> None:
    """Overflows are counted, errors follow the loss scale, and the exact gather sends its messages."""
    whole, found = (pool.run(by_halves, whole, (3,), True, world_size=2) for whole in (True, False))
    assert found[0]["skipped"] == [0, 0, 0, 1, 1, 1, 1]
    assert found[0]["scales"][1] == 2 * found[0]["scales"][3], "it grew, and it fell"
    for report, same in zip(found, whole, strict=True):
        assert report["scales"] == same["scales"]
        assert report["errors"] == same["errors"]
        assert report["weight bytes"] == same["weight bytes"]
        assert report["weights"] == same["weights"]


@needs_mimo
def test_a_step_that_another_model_s_overflow_skips_is_skipped(pool: Any) -> None:
    """This model's optimizer has prepared its gradients, and was not asked to use them."""
    for report in pool.run(by_halves, False, (3, 5), False, world_size=2):
        assert report["ended"] == 2
        assert report["replays"] == 0
        assert report["steps"] == 5


def with_a_scaler(grows: bool) -> dict[str, Any]:
    """In a worker: torch's GradScaler, whose scale may double every two steps, and which skips an overflow.

    Megatron exchanges after the backward pass. Errors are in units of the scale at which they were made.
    """
    tiny, state = built({"ddp": {"use_distributed_optimizer": False}}, {"bits": 4, "error_dtype": "fp32"})
    optimizer = torch.optim.SGD(tiny.parameters, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2 if grows else 100)
    errors, scales, skipped = [], [], []
    for step in range(7):
        gradients = tiny.random_gradients(step)
        if step == 4:
            for gradient in gradients:
                gradient.view(-1)[0] = torch.inf
        tiny.ddp.zero_grad_buffer()
        scaler.scale(tiny.ddp(gradients)).backward()
        tiny.ddp.finish_grad_sync()
        scales.append(scaler.get_scale())
        errors.append([error / scales[-1] for error in errors_of(state)])
        skipped.append(state.ledger.events.skipped_steps)
        for parameter in tiny.parameters:
            parameter.grad = parameter.main_grad.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {"errors": errors, "scales": scales, "skipped": skipped, "steps": state.ledger.steps}


def test_torch_s_scaler_rescales_errors_and_skips_steps(pool: Any) -> None:
    """Powers of two change no bit: with a scale that grows, errors are those of a constant one."""
    constant = pool.run(with_a_scaler, False, world_size=2)
    for found, same in zip(pool.run(with_a_scaler, True, world_size=2), constant, strict=True):
        assert found["scales"] == [4.0, 4.0, 8.0, 8.0, 16.0, 8.0, 8.0]
        assert found["skipped"] == same["skipped"] == [0, 0, 0, 0, 0, 1, 1]
        assert found["steps"] == same["steps"] == 6
        for mine, theirs in zip(found["errors"], same["errors"], strict=True):
            assert all((a == b).all() and a.any() for a, b in zip(mine, theirs, strict=True))
