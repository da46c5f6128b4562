"""The state of a model chunk: which steps count, when errors are cleared or rescaled, bytes, buffers."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from with_megatron.seam_runs import (
    MIXED,
    SEVERAL,
    any_error,
    built,
    compare,
    errors_of,
    events_of,
    logged,
    note,
    rerunning,
    same,
    trained,
)

import megatron_patch
from megatron_patch import disable
from megatron_patch.collectives.exchange import ExchangeTraffic
from megatron_patch.collectives.workspace import Pool
from megatron_patch.config import CompressionConfig
from megatron_patch.session.session import Session


def recorded(name: str, waits: list[str]) -> Any:
    """An exchange that notes when its handle is waited for."""
    handle = SimpleNamespace(wait=lambda: waits.append(name))
    return SimpleNamespace(start=lambda *_: handle, senders=[], traffic=lambda tensor: ExchangeTraffic())


def test_an_exchange_waits_for_old_ones_of_its_own_group_only():
    """Ranks may dispatch dense and expert buckets in unlike orders. The chunks of a rank have one limit."""
    waits: list[str] = []
    chunks = [Session(CompressionConfig(method="loco"), torch.device("cpu")) for _ in range(2)]
    for number, group in enumerate(("dense", "dense", "expert", "dense", "expert", "expert")):
        chunks[number % 2].start(recorded(f"{group} {number}", waits), None, None, True, group)
    assert waits == ["dense 0", "expert 2"]


def test_the_chunks_of_a_rank_share_their_buffers():
    """One chunk's payloads are over when the next one's begin; after `disable` there are others."""
    first, second = (Session(CompressionConfig(method="loco"), torch.device("cpu")) for _ in range(2))
    taken = first.workspace.take(3, 1000)
    first.workspace.give(taken)
    again = second.workspace.take(2, 1000)
    assert again.data_ptr() == taken.data_ptr()
    assert first.workspace.nbytes == second.workspace.nbytes == 3000
    disable()
    assert Session(CompressionConfig(method="loco"), torch.device("cpu")).workspace.nbytes == 0


def out_of_memory(model: dict[str, Any], failing: int) -> dict[str, Any]:
    """In a worker: five steps' shards; the third one's exchange fails, is caught, and is made again."""
    tiny, compressor = built(model, {"method": "naive"})
    shards = [tiny.step(tiny.random_gradients(step)) for step in range(2)]
    nbytes, take, calls, failed = [compressor.workspace.nbytes], Pool.take, [], False

    def full(pool: Pool, *size: Any) -> torch.Tensor:
        calls.append(size)
        if len(calls) == failing:
            raise torch.OutOfMemoryError
        return take(pool, *size)

    Pool.take = full
    try:
        tiny.step(tiny.random_gradients(2))
    except torch.OutOfMemoryError:
        failed = True
    finally:
        Pool.take = take
    for group in tiny.groups:
        group.grad_reduce_handle = None  # Megatron has no other way to begin anew
    gc.collect()
    shards += [tiny.step(tiny.random_gradients(step)) for step in range(2, 5)]
    nbytes.append(compressor.workspace.nbytes)
    return {"shards": shards, "weights": tiny.weights(), "nbytes": nbytes, "failed": failed}


@pytest.mark.parametrize(("model", "failing"), [({}, 2), (MIXED, 4), (SEVERAL, 3)])
def test_an_exchange_out_of_memory_leaves_nothing_behind(pool, model, failing):
    """Neither buffers, nor earlier buckets' gradients, which would be written into the next exchange's."""
    undisturbed = pool.run(trained, model, {"method": "naive"}, 5, world_size=2)
    for found, expected in zip(
        pool.run(out_of_memory, model, failing, world_size=2), undisturbed, strict=True
    ):
        assert found["failed"]
        assert found["nbytes"][1] < 1.1 * found["nbytes"][0], "which of two buffers serves what may change"
        assert same(found, expected)


def delayed(start: int, steps: int) -> dict[str, Any]:
    stock, _ = built({}, None)
    stock_shards = [stock.step(stock.random_gradients(step)) for step in range(steps)]
    tiny, compressor = built({}, {"start_step": start, "reset_interval": 2})
    report: dict[str, Any] = {"equal": [], "bits": []}
    for step in range(steps):
        gradients = tiny.random_gradients(step)
        shards = tiny.step(gradients)
        note(report, tiny, compressor, gradients, shards)
        report["equal"].append(bool((shards[0] == stock_shards[step][0]).all()))
        report["bits"].append(compressor.report.traffic.bits_per_element)
    report["events"] = events_of(compressor)
    return report


def test_compression_starts_at_start_step(pool):
    """Resets are every second optimizer step from the very first one on, and count once it has started."""
    start, steps = 3, 8
    reports = pool.run(delayed, start, steps)
    compare(reports, range(start, steps), bits=4, reset_interval=2)
    for report in reports:
        assert report["equal"] == [step < start for step in range(steps)]
        assert not any(error.any() for errors in report["errors"][:start] for error in errors)
        assert report["bits"][:start] == [32.0] * start
        assert max(report["bits"][start:]) < 5.1  # rows of 17 have a scale each; five elements have 32 bits
        assert report["events"]["uncompressed_syncs"] == start
        assert report["events"]["resets"] == 3


def left_out(later: bool) -> tuple[list[bool], tuple[int, int, int], int]:
    """A spiked batch that the loop leaves out: whether there are errors after each batch; the counts."""
    tiny, state = built(SEVERAL, {"bits": 4})
    errors = []
    for step in range(6):
        tiny.exchange([(1e3 if step == 3 else 1.0) * g for g in tiny.random_gradients(step)])
        if step != 3:
            tiny.optimizer.step()
        elif not later:  # or the next batch clears it
            tiny.ddp.zero_grad_buffer()
        errors.append(any_error(state))
    ledger, report = state.ledger, megatron_patch.report(tiny.ddp)
    return errors, (ledger.steps, ledger.steps_seen, ledger.events.skipped_steps), report.skipped_steps


@pytest.mark.parametrize("later", [False, True])
def test_a_batch_that_the_loop_leaves_out_is_a_skipped_step(pool, later):
    for errors, counts, told in pool.run(left_out, later):
        assert errors == [True, True, True, later, True, True]
        assert counts == (5, 6, 1)
        assert told == 1


def replayed() -> dict[str, Any]:
    tiny, compressor = built(SEVERAL, {"bits": 4})
    tiny.step(tiny.random_gradients(0))
    tiny.step(tiny.random_gradients(1))
    wire = compressor.report.traffic.nbytes
    tiny.exchange(tiny.random_gradients(2))
    with rerunning():
        again = tiny.exchange(tiny.random_gradients(2))
    report: dict[str, Any] = {"again": again, "errors": errors_of(compressor)}
    tiny.optimizer.step()
    report["replayed wire"] = compressor.report.traffic.nbytes == wire
    tiny.step(tiny.random_gradients(3))
    report["events"] = events_of(compressor)
    megatron_patch.disable()
    # What the second pass must look like with errors of zero; a first batch goes another way.
    fresh, other = built(SEVERAL, {"bits": 4})
    fresh.exchange(fresh.random_gradients(9))
    fresh.optimizer.step()
    other.clear_errors()
    report["fresh"] = fresh.exchange(fresh.random_gradients(2))
    report["fresh errors"] = errors_of(other)
    return report


def test_a_replayed_backward_pass_forgets_the_errors_and_counts_once(pool):
    for report in pool.run(replayed):
        for mine, theirs in (("again", "fresh"), ("errors", "fresh errors")):
            for a, b in zip(report[mine], report[theirs], strict=True):
                assert np.array_equal(a.numpy(), b.numpy())
        assert report["events"]["replays"] == 1
        assert report["events"]["steps"] == 4
        assert report["replayed wire"]


def exchanged_often(steps: int, times: int) -> dict[str, Any]:
    """Several exchanges in each step by the loop's design: backward passes, of which the last counts."""
    tiny, state = built(SEVERAL, {"bits": 2})
    report: dict[str, Any] = {"bytes": []}
    with logged() as messages:
        for step in range(steps):
            for time in range(times):
                gradients = tiny.random_gradients(times * step + time)
                for parameter in tiny.parameters:  # A sharpness-aware step ascends before its second pass.
                    parameter.detach().add_(1e-3)
                note(report, tiny, state, gradients, tiny.exchange(gradients))
            tiny.optimizer.step()
            report["bytes"].append(state.report.traffic.nbytes)
    report["events"] = events_of(state)
    report["messages"] = [line for line in messages if "more than once" in line]
    return report


def test_errors_are_kept_over_repeated_exchanges(pool):
    """Every exchange is the simulation's, which knows of no steps; the log says it once."""
    steps, times = 4, 2
    reports = pool.run(exchanged_often, steps, times)
    compare(reports, range(steps * times), bits=2)
    for rank, report in enumerate(reports):
        assert report["events"]["replays"] == 0
        # Until an optimizer step was seen, a second exchange may be the next step's.
        assert report["events"]["repeated_exchanges"] == (steps - 1) * (times - 1)
        assert report["events"]["steps"] == steps
        assert report["bytes"][-1] == report["bytes"][1] == times * report["bytes"][0]
        assert len(report["messages"]) == (rank == 0)


def one_by_one(whole: bool) -> dict[str, Any]:
    """Four steps of a chain of optimizers, of dense and of expert parameters; one of each, or one of all.

    The loss scale of fp16 doubles in every step, and errors follow it once.
    """
    scaling = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": 1, "hysteresis": 1}
    experts = {"experts": (0, 2), "expert_parallel": 2}
    model = {"dtypes": ("float16",), "optimizer": scaling, **experts}
    tiny, state = built(model, {"bits": 4, "start_step": 2, "error_dtype": "fp32"})
    parts = tiny.optimizer.chained_optimizers
    counted, reports, ratios = [], [], []
    for step in range(4):
        scale = float(tiny.optimizer.get_loss_scale())
        tiny.exchange([g * scale for g in tiny.random_gradients(step)])
        before = errors_of(state)
        for optimizer in [tiny.optimizer] if whole else parts:
            optimizer.step()
        pairs = zip(before, errors_of(state), strict=True)
        ratios += [float(b.abs().sum() / a.abs().sum()) for a, b in pairs if a.any()]
        ratios.append(float(tiny.optimizer.get_loss_scale()) / scale)
        counted.append((state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started))
        report = megatron_patch.report(tiny.ddp)
        reports.append((report.step, report.compressed, report.gradient_bytes, report.weight_bytes))
    found = {"counted": counted, "reports": reports, "ratios": ratios, "weights": tiny.weights()}
    return found | {"parts": len(parts)}


def test_optimizers_stepped_one_by_one_make_one_step(pool):
    for found, whole in zip(pool.run(one_by_one, False), pool.run(one_by_one, True), strict=True):
        assert found["parts"] == 2
        assert found["counted"] == [(1, 1, False), (2, 2, True), (3, 3, True), (4, 4, True)]
        assert found["counted"] == whole["counted"]
        assert found["reports"] == whole["reports"]
        assert [compressed for _, compressed, *_ in found["reports"]] == [False, False, True, True]
        assert all(nbytes > 0 for _, _, nbytes, _ in found["reports"])
        assert found["ratios"] == pytest.approx([2.0] * (4 + 2 * 2), rel=1e-6)
        assert bool((found["weights"] == whole["weights"]).all())


def without_optimizer(exchanges: int) -> dict[str, Any]:
    tiny, compressor = built({}, {"reset_interval": 3})
    report: dict[str, Any] = {}
    with logged() as messages:
        for step in range(exchanges):
            gradients = tiny.random_gradients(step)
            note(report, tiny, compressor, gradients, tiny.exchange(gradients))
    report["events"] = events_of(compressor)
    report["messages"] = [m for m in messages if m.startswith("WARNING")]
    return report


def test_a_loop_without_megatron_s_optimizer_counts_exchanges_and_says_so_once(pool):
    exchanges = 24
    reports = pool.run(without_optimizer, exchanges)
    compare(reports, range(exchanges), late=True, bits=4, reset_interval=3)
    for report in reports:
        assert report["events"]["steps"] == exchanges - 1
        assert report["events"]["resets"] == 7
        assert report["events"]["replays"] == 0
    (message,) = reports[0]["messages"]
    assert "no step of an optimizer was seen in 20 exchanges: exchanges count as steps" in message
    assert not any(report["messages"] for report in reports[1:])


def loss_scale(window: int, error_dtype: str) -> dict[str, Any]:
    scaling = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": window}
    model = {"dtypes": ("float16",), "optimizer": scaling | {"hysteresis": 1}}
    tiny, compressor = built(model, {"error_dtype": error_dtype})
    report: dict[str, Any] = {"scales": [], "follows": [], "overflow": []}
    for step in range(5):
        before = tiny.optimizer.get_loss_scale().item()
        gradients = [g * before for g in tiny.random_gradients(step)]
        if step == 3:
            gradients[0] = torch.full_like(gradients[0], torch.inf)
        tiny.exchange(gradients)
        errors = errors_of(compressor)
        successful, _, _ = tiny.optimizer.step()
        after = tiny.optimizer.get_loss_scale().item()
        report["scales"].append((before, after))
        report["overflow"].append(not successful)
        if successful:
            pairs = zip(errors, errors_of(compressor), strict=True)
            report["follows"].append(all(torch.equal(a * (after / before), b) and a.any() for a, b in pairs))
        else:
            report["follows"].append(not any_error(compressor))
    report["events"] = events_of(compressor)
    return report


@pytest.mark.parametrize(("window", "error_dtype"), [(2, "int8"), (1, "fp32")])
def test_errors_follow_the_loss_scale_of_fp16(pool, window, error_dtype):
    for report in pool.run(loss_scale, window, error_dtype):
        assert report["overflow"] == [False, False, False, True, False]
        changed = [after != before for before, after in report["scales"]]
        assert changed[3], "an overflow halves the scale"
        assert changed[:3] == ([True, True, True] if window == 1 else [False, True, False])
        assert report["follows"] == [True] * 5
        assert report["events"]["skipped_steps"] == 1


def buffers(compression: dict[str, Any]) -> dict[str, Any]:
    """Bytes of buffers after three steps of a model of several buckets."""
    tiny, compressor = built(SEVERAL | {"bucket_size": 100}, compression)
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    payloads = [s.layout.shards * s.layout.payload_bytes for s in compressor.senders]
    return {"buckets": len(payloads), "largest": max(payloads), "buffers": compressor.workspace.nbytes}


@pytest.mark.parametrize("topology", ["flat", "two_hop"])
def test_two_buckets_payloads_are_held_at_most(pool, topology):
    """Sending and receiving, for two buckets, and one that is packed; in two hops, one node's sum beside."""
    for report in pool.run(buffers, {"bits": 8, "ranks_per_node": 2, "topology": topology}):
        assert report["buckets"] >= 4
        sums = 4 * report["largest"] if topology == "two_hop" else 0
        assert report["largest"] * 2 <= report["buffers"] <= 5 * report["largest"] + sums
