"""megatron_patch.report: what a rank sent in its last step, and the one line where there is none.

On Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from with_megatron.seam_runs import built

BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}


def reports_of(model: dict[str, Any], compression: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """What every step reports."""
    import megatron_patch

    tiny, state = built(model, compression)
    found = []
    for step in range(steps):
        tiny.step(tiny.random_gradients(step))
        report = megatron_patch.report(tiny.ddp)
        assert report == megatron_patch.report([tiny.ddp]) == megatron_patch.report()
        found.append(dataclasses.asdict(report) | {"line": str(report), "held": state.error_bytes})
    megatron_patch.disable()
    return found


def test_a_report_is_that_of_the_step_before_it(pool):
    for first, *_, last in pool.run(
        reports_of, BF16, {"method": "loco", "bits": 4, "weight_gather": "exact"}, 3
    ):
        assert (first["step"], last["step"]) == (1, 3)
        assert (last["method"], last["bits"], last["weight_gather"]) == ("loco", 4, "exact")
        assert last["compressed"]
        assert last["gradient_bytes"] > 0
        assert 4 < last["bits_per_gradient"] < 9, "tiny payloads have more scales than 4.125 bits"
        assert last["weight_bytes"] > 0
        assert 0 < last["bits_per_weight"] <= 16 + 8, "a tiny message is mostly its header"
        assert first["error_norm"] == 0 < last["error_norm"] < last["gradient_norm"]
        assert last["error_bytes"] == last["held"] > 0
        assert 5 < last["snr_db"] < 60
        assert (last["non_finite_blocks"], last["gradient_bytes_inside_node"]) == (0, 0)
        assert last["line"].startswith("step 3: loco, 4 bits: ")
        assert "\n" not in last["line"]


def test_a_report_of_megatron_s_own_exchange_counts_its_bytes(pool):
    """A reduce-scatter and an all-gather of 4 ranks send three quarters of the elements each, in 2 bytes."""
    for (report,) in pool.run(reports_of, BF16, {"method": "none"}, 1):
        assert (report["bits"], report["compressed"], report["snr_db"]) == (None, False, None)
        assert report["bits_per_gradient"] == report["bits_per_weight"] == 16
        assert report["gradient_bytes"] == report["weight_bytes"] > 0
        assert (report["error_bytes"], report["error_norm"], report["gradient_norm"]) == (0, 0, 0)
        assert report["line"].startswith("step 1: none: 16.00 bits/gradient, 16.00 bits/weight")


def test_a_step_before_start_step_says_that_it_was_not_compressed(pool):
    for before, after in pool.run(reports_of, {}, {"method": "naive", "bits": 4, "start_step": 1}, 2):
        assert (before["compressed"], before["bits_per_gradient"]) == (False, 32)
        assert "not compressed in this step" in before["line"]
        assert after["compressed"]
        assert after["gradient_norm"] > 0


def unmeasured() -> list[Any]:
    import megatron_patch

    tiny, state = built(BF16, {"method": "loco", "bits": 4})
    reports = []
    for step in range(3):
        state.measures = step != 1
        tiny.step(tiny.random_gradients(step))
        reports.append(megatron_patch.report())
    megatron_patch.disable()
    return reports


def test_a_step_that_measures_nothing_says_so(pool):
    """As `megatron-loco train` has it for steps that it does not log."""
    for before, without, after in pool.run(unmeasured):
        assert without.compressed
        assert without.gradient_bytes == before.gradient_bytes > 0
        assert (without.error_norm, without.gradient_norm) == (None, None)
        assert (without.snr_db, without.non_finite_blocks) == (None, None)
        assert after.error_norm > 0
        assert after.non_finite_blocks == 0


def without_a_step() -> list[str]:
    from with_megatron.tiny_model import build

    import megatron_patch

    told = []

    def tell(model: Any = None) -> None:
        with pytest.raises(megatron_patch.UserError) as error:
            megatron_patch.report(model)
        told.append(str(error.value))

    tell()
    one, other = build().ddp, build().ddp
    tell(one)
    megatron_patch.attach(one, megatron_patch.CompressionConfig(bits=4))
    tell()
    tell([one])
    tell(other)
    megatron_patch.attach(other, megatron_patch.CompressionConfig(bits=2))
    tell()
    megatron_patch.disable()
    tell()
    return told


def test_where_there_is_nothing_to_report_one_line_says_why(pool):
    (told,) = pool.run(without_a_step, world_size=1)
    nothing, this, no_step, same_step, not_this, several, again = told
    assert nothing == again
    assert nothing.startswith("report(): no model is attached; call megatron_patch.enable()")
    assert this == not_this
    assert this.startswith("report(): this model is not attached; call")
    assert no_step == same_step
    assert "no optimizer step has ended yet" in no_step
    assert "different options" in several
    assert not any("\n" in line for line in told)
