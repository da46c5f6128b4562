"""Gradients that go bad: NaN and Inf anywhere, buckets of zeros, numbers at both ends of fp32.

On Megatron's real DDP, buckets and optimizers (tiny_model.py), 4 ranks, through every exchange there is: the
distributed optimizer's reduce-scatter, two instances of it, the replicated optimizer's all-reduce, experts.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from seeds import seeded

RANKS = 4
BLOCK = 64
EXCHANGES: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "experts": {"experts": (1, 4), "expert_parallel": 2, "overlap": True},
    "instances": {"instances": 2},
    "all-reduce": {"ddp": {"use_distributed_optimizer": False}},
}


def compressed(model: dict[str, Any], **compression: Any) -> tuple[Any, Any]:
    """(tiny model, its compressor)."""
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    tiny = build(**model)
    megatron_patch.attach(
        [tiny.ddp], megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    )
    return tiny, session_of(tiny.ddp)


def each(function: Any, model: dict[str, Any], compressions: list[dict[str, Any]]) -> list[Any]:
    """What `function` finds with each compression, in one run of the pool: its groups are made once."""
    return [function(model, **compression) for compression in compressions]


def errors_of(compressor: Any) -> list[Any]:
    """decode(e) of every sender and owner, flat; none without memory."""
    senders = [sender for sender in compressor.senders if sender.error is not None]
    return [sender.layout.flat(sender.error.decode()).clone() for sender in senders]


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
    import torch

    import megatron_patch

    scaling = {"initial_loss_scale": 2.0**12, "min_loss_scale": 1.0, "loss_scale_window": 1, "hysteresis": 1}
    tiny, compressor = compressed(model | {"dtypes": ("float16",), "optimizer": scaling}, block_size=BLOCK)
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
    report = {
        "wrong": wrong,
        "events": {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)},
        "injections": injections,
    }
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_every_rank_skips_the_step_and_drops_the_scale_in_fp16(pool, exchange):
    for report in pool.run(skipped_steps, EXCHANGES[exchange]):
        assert report["wrong"] == []
        assert report["events"]["skipped_steps"] == report["events"]["steps"] == report["injections"] >= 9


def seen_norms(model: dict[str, Any]) -> dict[str, Any]:
    """fp32 and bf16 have no skipped step: Megatron's gradient norm must tell every rank."""
    import torch

    import megatron_patch

    tiny, compressor = compressed(model, block_size=BLOCK)
    rank = torch.distributed.get_rank()
    finite, kept, counted = [], [], []
    tiny.step(tiny.random_gradients(0))
    for step in range(9 * len(tiny.buckets)):
        gradients = tiny.random_gradients(step + 1)
        index, element, value = place_of(tiny, step)
        culprit = step % RANKS
        if culprit == rank:
            gradients[index].view(-1)[element] = value
        tiny.exchange(gradients)
        tiny.optimizer.prepare_grads()
        finite.append(bool(np.isfinite(float(tiny.optimizer.get_grad_norm()))))
        errors = errors_of(compressor)
        kept.append(all(bool(e.isfinite().all()) for e in errors) and any(bool(e.any()) for e in errors))
        mine = compressor.senders[0::2] if compressor.senders[-1].layout.shards == 1 else compressor.senders
        bad = culprit == rank and tiny.parameters[index].dim() > 1  # a vector is in no block
        counted.append(bad == any(sender.statistics[-1].item() == 1 for sender in mine))
        compressor.optimizer_stepped([tiny.optimizer])
    megatron_patch.disable()
    return {"finite": finite, "kept": kept, "counted": counted}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exchange", ["reduce-scatter", "experts", "all-reduce"])
def test_every_rank_sees_it_in_the_gradient_norm(pool, exchange, dtype):
    model = EXCHANGES[exchange] | {"dtypes": (dtype,), "grad_reduce_in_fp32": dtype == "float32"}
    for report in pool.run(seen_norms, model):
        assert len(report["finite"]) >= 9
        assert not any(report["finite"])
        assert all(report["kept"]), "errors neither poisoned nor lost"
        assert all(report["counted"]), "only the culprit's senders count a bad block"


def checked() -> str:
    """Megatron's own check of the local gradient, which comes before the exchange."""
    import torch

    import megatron_patch

    tiny, _ = compressed({"ddp": {"check_for_nan_in_grad": True}})
    gradients = tiny.random_gradients(0)
    gradients[2][1, 1] = float("nan")
    try:
        tiny.exchange(gradients)
    except Exception as error:
        return str(error)
    finally:
        megatron_patch.disable()
        torch.distributed.barrier()
    return ""


def test_megatron_s_check_for_nan_still_comes_first(pool):
    for message in pool.run(checked):
        assert "NaN in local grad norm" in message


def zeros(model: dict[str, Any], bits: int) -> dict[str, Any]:
    import torch

    import megatron_patch

    tiny, compressor = compressed(model, bits=bits)
    shards = [tiny.exchange([torch.zeros_like(p) for p in tiny.parameters]) for _ in range(3)]
    report = {
        "shards": any(bool(shard.any()) for step in shards for shard in step),
        "errors": any(bool(error.any()) for error in errors_of(compressor)),
    }
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_a_bucket_of_zeros_stays_zeros(pool, exchange):
    for reports in pool.run(each, zeros, EXCHANGES[exchange], [{"bits": bits} for bits in (8, 4, 2, 1)]):
        assert reports == [{"shards": False, "errors": False}] * 4


def still(model: dict[str, Any], **compression: Any) -> list[bool]:
    """Whether each parameter has moved after steps with two resets of the errors among them."""
    import torch

    import megatron_patch

    tiny, _ = compressed(model, reset_interval=5, **compression)
    before = [p.detach().clone() for p in tiny.parameters]
    for step in range(12):
        gradients = tiny.random_gradients(step)
        gradients[3].zero_()  # five elements in the middle of a block
        gradients[1].zero_()
        tiny.step(gradients)
    moved = [not torch.equal(a, b) for a, b in zip(before, tiny.parameters, strict=True)]
    megatron_patch.disable()
    return moved


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_a_parameter_whose_gradient_is_always_zero_never_moves(pool, exchange):
    kinds = [
        {"bits": 8},
        {"bits": 4},
        {"bits": 2, "error_beta": 0.5},
        {"bits": 1},
    ]
    for reports in pool.run(each, still, EXCHANGES[exchange], kinds):
        assert reports == [[True, False, True, False, True]] * len(kinds)


def extremes(model: dict[str, Any], **compression: Any) -> dict[str, Any]:
    """Each block of the bucket has its own magnitude, from subnormal to nearly the largest fp32, or to
    where a rotation's sums leave fp32's range."""
    import torch
    import torch.distributed as dist

    import megatron_patch

    tiny, compressor = compressed(model, block_size=BLOCK, **compression)
    layout, (bucket,) = compressor.senders[0].layout, tiny.buckets
    magnitudes = torch.tensor([1e-44, 1e-41, 2e-38, 1e-30, 1.0, 1e38, 3e38])
    if compressor.config.rotates:
        magnitudes = magnitudes.clamp(max=1e36)
    chosen = magnitudes[torch.arange(layout.shards * layout.blocks) % len(magnitudes)]
    of_block = chosen.view(layout.shards, layout.blocks, 1).expand(-1, -1, layout.block)
    size = layout.flat(of_block)
    report: dict[str, Any] = {"finite": [], "worst": []}
    for step in range(4):
        generator = torch.Generator().manual_seed(seeded(17 * step + dist.get_rank()))
        gradient = (2 * torch.rand(layout.numel, generator=generator) - 1) * size
        exact = gradient.double() / RANKS
        dist.all_reduce(exact)
        bucket.grad_data.copy_(gradient)
        tiny.ddp.finish_grad_sync()
        reduced, shard = tiny.shards()[0].double(), slice(None)
        if reduced.numel() < layout.numel:
            shard = slice(dist.get_rank() * layout.shard_size, (dist.get_rank() + 1) * layout.shard_size)
        off = (reduced - exact[shard]).abs() / (size[shard].double() + 2.0**-120)
        report["finite"].append(all(bool(e.isfinite().all()) for e in [reduced, *errors_of(compressor)]))
        report["worst"].append(off.max().item())
        compressor.optimizer_stepped([tiny.optimizer])
        tiny.ddp.zero_grad_buffer()
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("exchange", ["reduce-scatter", "all-reduce"])
def test_subnormal_and_huge_gradients_stay_finite_and_near(pool, exchange):
    # Every sender is off by half a level of its block's largest element at most, and so is the owner that
    # sends the mean; the moving average holds no more than that, and is added once. Scales are bf16: 2^-7 of
    # them, and among the subnormal ones 2^-133, rounded up.
    kinds = [
        {"bits": bits, "method": method, "codec": codec}
        for bits, codec in ((8, "uniform"), (4, "uniform"), (4, "levels"))
        for method in ("naive", "loco")
    ]
    for reports in pool.run(each, extremes, EXCHANGES[exchange], kinds):
        for kind, report in zip(kinds, reports, strict=True):
            half_a_level = 0.5 * (1 + 2**-7) / (2 ** (kind["bits"] - 1) - 1) + RANKS * 2.0 ** (-133 + 120)
            if (
                kind["codec"] == "levels"
            ):  # a rotated block's errors add up in chance: 10 % of the energy's root
                half_a_level *= 2
            twice = 2 if kind["method"] == "loco" else 1
            bound = half_a_level * (2 if exchange == "all-reduce" else 1) * twice * 1.1
            assert report["finite"] == [True] * 4, kind
            assert 0 < max(report["worst"]) <= bound, kind
