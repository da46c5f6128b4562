"""megatron_patch.report: what a rank sent in its last step, and the one line where there is none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from with_megatron.seam_runs import built
from with_megatron.tiny_model import build

import megatron_patch

BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}


def reports_of(model: dict[str, Any], compression: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """What every step reports."""
    tiny, state = built(model, compression)
    found = []
    sizes = [sender.layout.payload_sizes for sender in state.senders]
    sent = sum(sum(each) - each[dist.get_rank()] for each in sizes)
    for step in range(steps):
        tiny.step(tiny.random_gradients(step))
        report = megatron_patch.report(tiny.ddp)
        assert report == megatron_patch.report([tiny.ddp]) == megatron_patch.report()
        found.append(
            dataclasses.asdict(report) | {"line": str(report), "held": state.error_bytes, "sent": sent}
        )
    return found


def test_a_report_is_that_of_the_step_before_it(pool):
    for first, *_, last in pool.run(
        reports_of, BF16, {"method": "loco", "bits": 4, "weight_gather": "exact"}, 3
    ):
        assert (first["step"], last["step"]) == (1, 3)
        assert (last["method"], last["bits"], last["weight_gather"]) == ("loco", 4, "exact")
        assert last["compressed"]
        assert last["gradient_bytes"] == last["sent"] > 0
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
        assert report["bytes_inside_node"] + report["bytes_between_nodes"] == 2 * report["gradient_bytes"]
        assert report["wait_seconds"] > 0


def waits_of_steps() -> list[float | None]:
    """In a worker: the waits that steps report of which the middle ones are not timed; coding takes 100 s."""
    from megatron_patch.collectives import workspace
    from megatron_patch.megatron.seams import weights

    tiny, session = built(BF16, {"method": "none", "weight_gather": "exact"})
    code, clock, found = weights._code, SimpleNamespace(now=0.0), []

    def slow(*args: Any) -> None:
        clock.now += 100
        code(*args)

    with (
        mock.patch.object(weights, "_code", slow),
        mock.patch.object(workspace.time, "perf_counter", side_effect=lambda: clock.now),
    ):
        for step, session.watches in enumerate([True, False, False, False, True]):
            tiny.step(tiny.random_gradients(step))
            found.append(megatron_patch.report(tiny.ddp).wait_seconds)
    return found


def test_a_step_s_waits_are_its_own(pool):
    """Those of steps that were not timed do not come with the next one's."""
    assert pool.run(waits_of_steps) == [[100, None, None, None, 100]] * 4


def without_a_step() -> list[str]:
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
