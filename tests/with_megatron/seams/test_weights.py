"""The exact weight gather changes no bit of a training, under any parallelism, and heals what stock heals.

A tiny GPT (gpt_model.py) is trained twice in the same workers, with Megatron's own gather and with the exact
one: losses, gradient norms, weights and the optimizer's state of every rank must be the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from with_megatron.gpt_model import BF16, GATHERED, build
from with_megatron.seam_runs import attachment_of, logged, refusal
from with_megatron.weight_runs import both, differences, unused_module

import megatron_patch

STEPS = 50

ALIGNED = {"pp": 2, "vpp": 2, "layers": 4}
SKIPPING = {"initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1}
LOCO = {"method": "loco", "bits": 4}


def bf16(model: dict[str, Any] | None = None, **ddp: Any) -> dict[str, Any]:
    return BF16 | (model or {}) | {"ddp": BF16["ddp"] | ddp}


def fp16(**ddp: Any) -> dict[str, Any]:
    return bf16({"dtype": "fp16", "optimizer": SKIPPING}, **ddp)


# name: (ranks, model, method, what happens around steps)
ONEBIT = {"method": "onebit_adam", "warmup_steps": 3}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "loco-two-hop-dp4": (4, bf16(), LOCO | {"ranks_per_node": 2}, "nothing"),
    "dp4-overlap-evaluations": (4, bf16(**GATHERED), {}, "evaluations"),
    "dp2-overlap-inference-mode": (2, bf16(**GATHERED), {}, "evaluations_in_inference_mode"),
    "dp2-overlap-forced": (2, bf16(**GATHERED), {}, "forced_twice"),
    "dp2-overlap-user-edits": (2, bf16(**GATHERED), {}, "user_edits"),
    "dp4-one-copy-changes": (4, bf16(), {}, "one_copy_changes"),
    "dp2-fp16-skipped-steps-overlap": (2, fp16(**GATHERED), {}, "evaluations"),
    "tp2-sp-dp2-tied": (4, bf16({"tp": 2, "sequence_parallel": True, "tied": True}), {}, "nothing"),
    "pp2-dp2-tied-overlap": (4, bf16({"pp": 2, "tied": True}, **GATHERED), {}, "evaluations"),
    "pp2-vpp2-dp2-aligned": (4, bf16(ALIGNED, **GATHERED, align_param_gather=True), {}, "evaluations"),
    "pp2-vpp2-dp2-with-optimizer-step": (
        4,
        bf16(
            ALIGNED | {"optimizer": {"overlap_param_gather_with_optimizer_step": True}},
            **GATHERED,
            align_param_gather=True,
        ),
        {},
        "nothing",
    ),
    "instances2-dp2-overlap": (4, bf16({"instances": 2}, **GATHERED), {}, "nothing"),
    "loco-ep2-dp4-overlap": (4, bf16({"experts": 4, "ep": 2}, **GATHERED), LOCO, "evaluations"),
    "onebit-dp2-overlap": (2, bf16(**GATHERED), ONEBIT, "nothing"),
}
FAST_STEPS = 8


@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_the_training_changes(pool, case):
    check(pool, case, FAST_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_the_training_changes_in_50_steps(pool, case):
    check(pool, case, STEPS)


def check(pool: Any, case: str, steps: int) -> None:
    ranks, model, method, around = CASES[case]
    for stock, exact in pool.run(both, model, method, steps, around, world_size=ranks):
        assert differences(stock, exact) == []
        assert stock["raw"] == {}
        assert exact["stock"]
        assert set(exact["stock"]) == {None}
        expect_messages(case, steps, stock, exact)


def expect_messages(case: str, steps: int, stock: dict[str, Any], exact: dict[str, Any]) -> None:
    """That messages were sent, and weights in full only where they had to be."""
    groups, raw = len(exact["stock"]), exact["raw"]
    sent = [bits for bits in exact["bits"] if bits]
    forced = raw.pop("forced", 0)
    if "overlap" in case or "aligned" in case:
        assert raw.pop("not_coded", 0) >= groups or forced, "the first forward pass, before any step"
    if "with-optimizer-step" in case:
        assert raw.pop("inside_step") >= steps
        assert raw.pop("not_coded") == groups
        assert min(sent) < 12
        return
    if "user-edits" in case and "overlap" in case:
        assert raw.pop("edited") >= groups * (steps // 5)
    if "one-copy-changes" in case:
        assert raw.pop("copies_differ") == steps // 4
    assert raw == {}
    assert all(bits == 16 for bits in stock["bits"] if bits)
    if "fp16" in case:  # of the last steps some are skipped
        assert min(sent) < 12
        return
    assert min(sent) < 6
    assert exact["unchanged"]
    assert all(same < weights for same, weights in exact["unchanged"])
    assert any(same > 0 for same, _ in exact["unchanged"])


def with_unused_module(steps: int) -> Any:
    return [unused_module(gather, steps) for gather in ("stock", "exact")]


def test_a_module_that_a_step_leaves_out_is_gathered_when_it_is_used_again(pool):
    for stock, exact in pool.run(with_unused_module, 20):
        assert exact.pop("told") == {"not_coded": 2}, "the first forward pass; all others were messages"
        stock.pop("told")
        assert stock["losses"] == exact["losses"]
        assert all(map(np.array_equal, stock["behind"], exact["behind"])), "left out after the last step too"
        assert differences(stock | {"told": 0}, exact | {"told": 0}) == []


def attached(model: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """What attaching to a tiny GPT says."""
    gpt = build(**model)
    with logged() as lines:
        megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**options))
    return lines


EXACT = {"method": "none", "weight_gather": "exact"}
DATA = ": 7,552 weights in 1 bucket, "
STOCK = "Megatron's own: "
SAID = {
    "bf16": (bf16(), EXACT, f"weight gather over 4 data parallel ranks{DATA}from their changes, exactly"),
    "fp32": (
        {},
        EXACT,
        f"over 4 data parallel ranks{DATA}{STOCK}fp32 weights change in nearly all of their bits",
    ),
    "replicated": (
        bf16(use_distributed_optimizer=False),
        EXACT,
        "without the distributed optimizer's buffers none is coded",
    ),
    "auto": (bf16(), {"method": "none"}, "exactly, or Megatron's own: the faster one in turns of both"),
    "stock": (bf16(), {"method": "none", "weight_gather": "stock"}, None),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_coded_is_said_and_what_stays_stock_and_why(pool, name):
    model, options, wanted = SAID[name]
    lines, *others = pool.run(attached, model, options)
    assert not any(others)
    said = [line for line in lines if "weight" in line]
    assert bool(said) is (wanted is not None)
    assert wanted is None or any(wanted in line for line in said), said


def in_pieces() -> dict[str, Any]:
    """A step that fails, a release without the global, and messages of many buckets in flight."""
    from megatron.core.distributed import param_and_grad_buffer

    gpt = build(**bf16(**GATHERED | {"bucket_size": 800}))
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**EXACT))
    weights = attachment_of(gpt.chunks[0]).weights
    report: dict[str, Any] = {"groups": len(weights.seams), "failed": None, "unsupported": None}
    inner = gpt.optimizer.chained_optimizers[0].optimizer
    for step in range(4):
        gpt.backward(step)
        if step == 1:
            step_of, inner.step = inner.step, lambda: 1 / 0
            try:
                gpt.optimizer.step()
            except ZeroDivisionError as error:
                report["failed"] = str(error), {seam._state.name for seam in weights.seams}
            inner.step = step_of
        gpt.optimizer.step()
    for chunk in gpt.chunks:  # all bucket groups at once, as schedules that align gathers do
        chunk.start_param_sync()
    messages = sum(max(seam.gathers[0].lengths) * 4 for seam in weights.seams)
    report["in_flight"] = len(weights.in_flight)
    report["buffers"] = weights.session.workspace.nbytes / messages
    for seam in weights.seams:
        seam.group.finish_param_sync(skip_next_bucket_dispatch=True)
    report["raw"] = dict(weights.raw_gathers)
    gpt.backward(9)
    gpt.optimizer.step()
    upstream = param_and_grad_buffer.dist_all_gather_func
    group = weights.seams[0].group
    weights.seams[0]._original = lambda force_sync=False: None
    try:
        group.start_param_sync()
    except RuntimeError as error:
        report["unsupported"] = str(error)
    report["restored"] = param_and_grad_buffer.dist_all_gather_func is upstream
    megatron_patch.disable()
    report["detached"] = "start_param_sync" not in vars(group)
    return report


def test_steps_that_fail_releases_that_differ_and_few_messages_in_flight(pool):
    for report in pool.run(in_pieces):
        assert report["failed"] == ("division by zero", {"IN_FULL"}), "a gather that comes now is made"
        assert report["raw"] == {"not_coded": report["groups"]}, "the gather after the failed step was coded"
        assert report["groups"] >= 5
        assert report["in_flight"] == 2
        assert report["buffers"] < 0.6
        assert "dist_all_gather_func" in report["unsupported"]
        assert report["restored"]
        assert report["detached"]


def refused(compression: dict[str, Any], optimizer: dict[str, Any]) -> str:
    gpt = build(**bf16())
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**compression))
    for part in gpt.optimizer.chained_optimizers:
        for name, value in optimizer.items():
            setattr(part.config, name, value)
    gpt.backward(0)
    return refusal(gpt.optimizer.step)


@pytest.mark.parametrize(
    "compression", [EXACT, {}, {"method": "onebit_adam", "bits": 1, "warmup_steps": 3}], ids=str
)
def test_an_optimizer_that_is_replayed_from_a_cuda_graph_is_refused(pool, compression):
    for text in pool.run(refused, compression, {"optimizer_cuda_graph": True}, world_size=2):
        assert text.startswith("megatron.optimizer_cuda_graph: True cannot be combined with")
        assert "leave it out" in text
