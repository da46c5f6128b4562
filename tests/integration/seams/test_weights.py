"""The exact weight gather changes no bit of a training, under any parallelism, and heals what stock heals.

A tiny GPT (gpt_model.py) is trained twice in the same workers, with Megatron's own gather and with the exact
one: losses, gradient norms, weights and the optimizer's state of every rank must be the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
from integration.weight_runs import both, differences

STEPS = 50

BF16 = {"dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1500}
ALIGNED = {"pp": 2, "vpp": 2, "layers": 4}
SKIPPING = {"initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1}
LOCO = {"method": "loco", "bits": 4}


def bf16(model: dict[str, Any] | None = None, **ddp: Any) -> dict[str, Any]:
    return BF16 | (model or {}) | {"ddp": BF16["ddp"] | ddp}


def fp16(**ddp: Any) -> dict[str, Any]:
    return bf16({"dtype": "fp16", "optimizer": SKIPPING}, **ddp)


# name: (ranks, model, method, what happens around steps)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "dp4": (4, bf16(), {}, "nothing"),
    "dp4-fp32-gradients": (4, bf16(grad_reduce_in_fp32=True), {}, "nothing"),
    "dp4-overlap": (4, bf16(**OVERLAP), {}, "nothing"),
    "dp4-overlap-evaluations": (4, bf16(**OVERLAP), {}, "evaluations"),
    "dp4-overlap-forced": (4, bf16(**OVERLAP), {}, "forced_twice"),
    "dp4-forced": (4, bf16(), {}, "forced_twice"),
    "dp4-user-edits": (4, bf16(), {}, "user_edits"),
    "dp4-overlap-user-edits": (4, bf16(**OVERLAP), {}, "user_edits"),
    "dp4-one-copy-changes": (4, bf16(), {}, "one_copy_changes"),
    "dp4-precision-aware": (4, bf16(), {}, "precision_aware"),
    "dp4-overlap-precision-aware": (4, bf16(**OVERLAP), {}, "precision_aware"),
    "dp4-fp16-skipped-steps": (4, fp16(), {}, "nothing"),
    "dp4-fp16-skipped-steps-overlap": (4, fp16(**OVERLAP), {}, "evaluations"),
    "tp2-sp-dp2-tied": (4, bf16({"tp": 2, "sequence_parallel": True, "tied": True}), {}, "nothing"),
    "pp2-dp2-tied": (4, bf16({"pp": 2, "tied": True}), {}, "nothing"),
    "pp2-dp2-tied-overlap": (4, bf16({"pp": 2, "tied": True}, **OVERLAP), {}, "evaluations"),
    "pp2-vpp2-dp2": (4, bf16(ALIGNED), {}, "nothing"),
    "pp2-vpp2-dp2-aligned": (4, bf16(ALIGNED, **OVERLAP, align_param_gather=True), {}, "evaluations"),
    "pp2-vpp2-dp2-with-optimizer-step": (
        4,
        bf16(
            ALIGNED | {"optimizer": {"overlap_param_gather_with_optimizer_step": True}},
            **OVERLAP,
            align_param_gather=True,
        ),
        {},
        "nothing",
    ),
    "ep2-dp4": (4, bf16({"experts": 4, "ep": 2}), {}, "nothing"),
    "ep2-dp4-overlap": (4, bf16({"experts": 4, "ep": 2}, **OVERLAP), {}, "evaluations"),
    "instances2-dp2": (4, bf16({"instances": 2}), {}, "nothing"),
    "instances2-dp2-overlap": (4, bf16({"instances": 2}, **OVERLAP), {}, "nothing"),
    "loco-dp4": (4, bf16(), LOCO, "nothing"),
    "loco-dp4-overlap": (4, bf16(**OVERLAP), LOCO, "evaluations"),
    "loco-ep2-dp4-overlap": (4, bf16({"experts": 4, "ep": 2}, **OVERLAP), LOCO, "nothing"),
    "loco-two-hop-dp4": (4, bf16(), LOCO | {"ranks_per_node": 2}, "nothing"),
    "onebit-dp4": (4, bf16(), {"method": "onebit_adam", "warmup_steps": 10}, "nothing"),
    "onebit-dp4-overlap": (4, bf16(**OVERLAP), {"method": "onebit_adam", "warmup_steps": 10}, "nothing"),
}
FAST_STEPS = 14
IN_PARTS = ("dp4-fp32-gradients", "dp4-overlap", "pp2-dp2-tied", "pp2-vpp2-dp2", "loco-dp4", "onebit-dp4")
"""Cases whose parts others have too."""


@pytest.mark.parametrize("case", [name for name in CASES if name not in IN_PARTS])
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
    assert all(0 < same < weights for same, weights in exact["unchanged"])
