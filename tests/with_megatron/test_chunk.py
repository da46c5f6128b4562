"""The state of a model chunk: which steps count, when errors are cleared or rescaled, bytes, buffers.

On Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation
from with_megatron.seam_runs import (
    MANY,
    RANKS,
    SEVERAL,
    any_error,
    built,
    errors_of,
    labels_of,
    logged,
    rerunning,
    same,
    scaled,
    trained,
)

from megatron_patch.collectives.exchange import ExchangeTraffic
from megatron_patch.config import CompressionConfig
from megatron_patch.session.session import Session


class Recorded:
    """An exchange, and its handle, that note when they are waited for."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self.waits = name, waits

    def start(self, *_: object) -> Recorded:
        return self

    def wait(self) -> None:
        self.waits.append(self.name)

    @property
    def senders(self) -> list[Any]:
        return []

    def traffic(self, tensor: object) -> ExchangeTraffic:
        return ExchangeTraffic()


def test_an_exchange_waits_for_old_ones_of_its_own_group_only():
    """Ranks may dispatch dense and expert buckets in unlike orders. The chunks of a rank have one limit."""
    waits: list[str] = []
    chunks = [Session(CompressionConfig(method="loco"), torch.device("cpu")) for _ in range(2)]
    for number, group in enumerate(("dense", "dense", "expert", "dense", "expert", "expert")):
        exchange = Recorded(f"{group} {number}", waits)
        chunks[number % 2].start(exchange, None, None, True, group)
    assert waits == ["dense 0", "expert 2"]


def test_the_chunks_of_a_rank_share_their_buffers():
    """One chunk's payloads are over when the next one's begin; after `disable` there are others."""
    from megatron_patch import disable

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
    import gc

    import megatron_patch
    from megatron_patch.collectives.workspace import Pool

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
    megatron_patch.disable()
    return {"shards": shards, "weights": tiny.weights(), "nbytes": nbytes, "failed": failed}


MIXED = {"dtypes": ("float32", "bfloat16"), "grad_reduce_in_fp32": False, "single_group": True}


@pytest.mark.parametrize(
    ("model", "failing"), [({}, 2), (MIXED, 3), (MIXED, 4), (SEVERAL, 2), (SEVERAL, 3), (SEVERAL, 5)]
)
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
    import megatron_patch

    stock, _ = built({}, None)
    stock_shards = [stock.step(stock.random_gradients(step)) for step in range(steps)]
    tiny, compressor = built({}, {"start_step": start, "reset_interval": start + 2})
    report: dict[str, Any] = {"equal": [], "errors": [], "gradients": [], "shards": [], "bits": []}
    for step in range(steps):
        gradients = tiny.random_gradients(step)
        (shard,) = tiny.step(gradients)
        report["equal"].append(bool((shard == stock_shards[step][0]).all()))
        report["errors"].append(errors_of(compressor)[0])
        report["gradients"].append(scaled(tiny, gradients)[0])
        report["shards"].append(shard)
        report["bits"].append(compressor.report.traffic.bits_per_element)
    report["labels"] = labels_of(tiny)
    report["syncs"] = compressor.ledger.events.uncompressed_syncs
    report["resets"] = compressor.ledger.events.resets
    megatron_patch.disable()
    return report


def test_compression_starts_at_start_step(pool):
    start, steps = 3, 8
    reports = pool.run(delayed, start, steps)
    numel = reports[0]["gradients"][0].numel()
    # Resets count optimizer steps from the very first, so the simulation steps from there as well.
    agreement = Agreement(
        LoCoSimulation(RANKS, numel, bits=4, reset_interval=start + 2, labels=reports[0]["labels"][0])
    )
    agreement.simulation.steps = start
    for step in range(start, steps):
        rows = {
            name: np.stack([r[name][step].numpy() for r in reports])
            for name in ("gradients", "errors", "shards")
        }
        agreement.check(rows["gradients"], errors=rows["errors"], shards=rows["shards"])
    for report in reports:
        assert report["equal"] == [step < start for step in range(steps)]
        assert not any(error.any() for error in report["errors"][:start])
        assert report["bits"][:start] == [32.0] * start
        assert max(report["bits"][start:]) < 5.1  # rows of 17 have a scale each; five elements have 32 bits
        assert report["syncs"] == start
        assert report["resets"] == 1


def skipped() -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(SEVERAL, {"reset_interval": 4})
    report: dict[str, Any] = {"errors": [], "counts": []}
    for step in range(6):
        tiny.exchange(tiny.random_gradients(step))
        parts = tiny.optimizer.chained_optimizers
        if step == 2:
            for part in parts:
                part.prepare_grads = lambda: True
        successful, _, _ = tiny.optimizer.step()
        for part in parts:
            vars(part).pop("prepare_grads", None)
        assert successful == (step != 2)
        report["errors"].append(any_error(compressor))
        report["counts"].append((compressor.ledger.steps, compressor.ledger.steps_seen))
    report["events"] = {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)}
    megatron_patch.disable()
    return report


def test_a_skipped_step_forgets_the_errors_and_does_not_count(pool):
    for report in pool.run(skipped):
        # Steps 0, 1, 3, 4 succeeded: the reset after four of them falls on step 4.
        assert report["errors"] == [True, True, False, True, False, True]
        assert report["counts"] == [(1, 1), (2, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
        assert report["events"] == {
            "steps": 5,
            "resets": 1,
            "skipped_steps": 1,
            "replays": 0,
            "repeated_exchanges": 0,
            "uncompressed_syncs": 0,
        }


def left_out(model: dict[str, Any], later: bool) -> tuple[list[bool], tuple[int, int, int], int]:
    """A spiked batch that the loop leaves out: whether there are errors after each batch; the counts."""
    import megatron_patch

    tiny, state = built(model, {"bits": 4})
    errors = []
    for step in range(6):
        tiny.exchange([(1e3 if step == 3 else 1.0) * g for g in tiny.random_gradients(step)])
        if step != 3:
            tiny.optimizer.step()
        elif not later:
            tiny.ddp.zero_grad_buffer()
        errors.append(any_error(state))
    if later:  # The next batch has cleared it.
        assert errors[3]
    ledger, report = state.ledger, megatron_patch.report(tiny.ddp)
    megatron_patch.disable()
    return errors, (ledger.steps, ledger.steps_seen, ledger.events.skipped_steps), report.skipped_steps


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "several groups"])
def test_a_batch_that_the_loop_leaves_out_is_a_skipped_step(pool, model):
    for errors, counts, told in pool.run(left_out, model, False):
        assert errors == [True, True, True, False, True, True]
        assert counts == (5, 6, 1)
        assert told == 1
    for _, counts, _ in pool.run(left_out, model, True):
        assert counts == (5, 6, 1)


def replayed(model: dict[str, Any]) -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(model, {"bits": 4})
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
    report["events"] = {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)}
    # Another model that never ran before: what the second pass must look like with errors of zero.
    megatron_patch.disable()
    fresh, other = built(model, {"bits": 4})
    if model.get("overlap"):
        # Its first batch goes another way; forget what that one remembered.
        fresh.exchange(fresh.random_gradients(9))
        fresh.optimizer.step()
        other.clear_errors()
    report["fresh"] = fresh.exchange(fresh.random_gradients(2))
    report["fresh errors"] = errors_of(other)
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "several groups"])
def test_a_replayed_backward_pass_forgets_the_errors_and_counts_once(pool, model):
    for report in pool.run(replayed, model):
        for mine, theirs in (("again", "fresh"), ("errors", "fresh errors")):
            for a, b in zip(report[mine], report[theirs], strict=True):
                assert np.array_equal(a.numpy(), b.numpy())
        assert report["events"]["replays"] == 1
        assert report["events"]["steps"] == 4
        assert report["replayed wire"]


def exchanged_often(model: dict[str, Any], steps: int, times: int) -> dict[str, Any]:
    """Several exchanges in each step by the loop's design: backward passes, of which the last counts."""
    import megatron_patch

    tiny, state = built(model, {"bits": 2})
    report: dict[str, Any] = {"shards": [], "errors": [], "gradients": [], "bytes": []}
    with logged() as messages:
        for step in range(steps):
            for time in range(times):
                gradients = tiny.random_gradients(times * step + time)
                for parameter in tiny.parameters:  # A sharpness-aware step ascends before its second pass.
                    parameter.detach().add_(1e-3)
                report["shards"].append(tiny.exchange(gradients))
                report["errors"].append(errors_of(state))
                report["gradients"].append(scaled(tiny, gradients))
            tiny.optimizer.step()
            report["bytes"].append(state.report.traffic.nbytes)
    report["labels"] = labels_of(tiny)
    report["events"] = {"steps": state.ledger.steps, **dataclasses.asdict(state.ledger.events)}
    report["messages"] = [line for line in messages if "more than once" in line]
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "several groups"])
def test_errors_are_kept_over_repeated_exchanges(pool, model):
    """Every exchange is the simulation's, which knows of no steps; the log says it once."""
    steps, times = 4, 2
    reports = pool.run(exchanged_often, model, steps, times)
    for bucket in range(len(reports[0]["shards"][0])):
        numel = reports[0]["gradients"][0][bucket].numel()
        agreement = Agreement(LoCoSimulation(RANKS, numel, bits=2, labels=reports[0]["labels"][bucket]))
        for number in range(steps * times):
            rows = {
                name: np.stack([r[name][number][bucket].numpy() for r in reports])
                for name in ("gradients", "errors", "shards")
            }
            agreement.exchange(rows["gradients"], shards=rows["shards"])
            agreement.end_step(errors=rows["errors"])
    for rank, report in enumerate(reports):
        assert report["events"]["replays"] == 0
        # Until an optimizer step was seen, a second exchange may be the next step's.
        assert report["events"]["repeated_exchanges"] == (steps - 1) * (times - 1)
        assert report["events"]["steps"] == steps
        assert report["bytes"][-1] == report["bytes"][1] == times * report["bytes"][0]
        assert len(report["messages"]) == (rank == 0)


def before_the_first_step() -> dict[str, Any]:
    """A loop that throws its first three batches away: nothing has told yet that there is an optimizer."""
    import megatron_patch

    tiny, state = built({}, {"bits": 4, "start_step": 2})
    with logged() as messages:
        for step in range(4):
            tiny.exchange(tiny.random_gradients(step))
        tiny.optimizer.step()
        counted = [(state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started)]
        for step in range(4, 6):
            tiny.step(tiny.random_gradients(step))
            counted.append((state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started))
    warnings = len([m for m in messages if m.startswith("WARNING")])
    report = {"counted": counted, "warnings": warnings}
    megatron_patch.disable()
    return report


def test_batches_thrown_away_before_the_first_step_are_no_steps(pool):
    for report in pool.run(before_the_first_step):
        assert report["counted"] == [(1, 1, False), (2, 2, True), (3, 3, True)]
        assert report["warnings"] == 0


def one_by_one(whole: bool) -> dict[str, Any]:
    """Four steps of a chain of optimizers, of dense and of expert parameters; one of each, or one of all."""
    import megatron_patch

    tiny, state = built({"experts": (0, 2), "expert_parallel": 2}, {"bits": 4, "start_step": 2})
    parts = tiny.optimizer.chained_optimizers
    counted, reports = [], []
    for step in range(4):
        tiny.exchange(tiny.random_gradients(step))
        for optimizer in [tiny.optimizer] if whole else parts:
            optimizer.step()
        counted.append((state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started))
        report = megatron_patch.report(tiny.ddp)
        reports.append((report.step, report.compressed, report.gradient_bytes, report.weight_bytes))
    found = {"parts": len(parts), "counted": counted, "reports": reports, "weights": tiny.weights()}
    megatron_patch.disable()
    return found


def test_optimizers_stepped_one_by_one_make_one_step(pool):
    for found, whole in zip(pool.run(one_by_one, False), pool.run(one_by_one, True), strict=True):
        assert found["parts"] == 2
        assert found["counted"] == [(1, 1, False), (2, 2, True), (3, 3, True), (4, 4, True)]
        assert found["counted"] == whole["counted"]
        assert found["reports"] == whole["reports"]
        assert [compressed for _, compressed, *_ in found["reports"]] == [False, False, True, True]
        assert all(nbytes > 0 for _, _, nbytes, _ in found["reports"])
        assert bool((found["weights"] == whole["weights"]).all())


def scaled_one_by_one() -> list[tuple[float, float]]:
    """By how much a step of two fp16 optimizers changes the loss scale, and the errors."""
    import megatron_patch

    options = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": 1, "hysteresis": 1}
    model = {"dtypes": ("float16",), "experts": (0, 2), "expert_parallel": 2, "optimizer": options}
    tiny, state = built(model, {"error_dtype": "fp32"})
    found = []
    for step in range(2):
        before = float(tiny.optimizer.get_loss_scale())
        tiny.exchange([g * before for g in tiny.random_gradients(step)])
        errors = errors_of(state)
        for part in tiny.optimizer.chained_optimizers:
            part.step()
        after = float(tiny.optimizer.get_loss_scale())
        ratio = [float(b.abs().sum() / a.abs().sum()) for a, b in zip(errors, errors_of(state), strict=True)]
        found += [(after / before, each) for each in ratio]
    megatron_patch.disable()
    return found


def test_errors_follow_the_loss_scale_once_a_step(pool):
    for found in pool.run(scaled_one_by_one):
        assert found
        for scale, errors in found:
            assert scale == 2.0
            assert errors == pytest.approx(2.0, rel=1e-6)


def resets_before_the_start() -> tuple[int, int]:
    import megatron_patch

    tiny, state = built({}, {"start_step": 7, "reset_interval": 2})
    for step in range(7):
        tiny.step(tiny.random_gradients(step))
    before = state.ledger.events.resets
    for step in range(7, 11):
        tiny.step(tiny.random_gradients(step))
    found = before, state.ledger.events.resets
    megatron_patch.disable()
    return found


def test_resets_are_counted_once_compression_has_started(pool):
    assert pool.run(resets_before_the_start) == [(0, 2)] * 4


def torch_optimizers(several: bool) -> dict[str, Any]:
    """A loop with optimizers of torch, which step on `main_grad`."""
    import torch

    import megatron_patch

    tiny, state = built({"ddp": {"use_distributed_optimizer": False}}, {"bits": 4})
    for parameter in tiny.parameters:
        parameter.grad = parameter.main_grad
    cut = 2 if several else len(tiny.parameters)
    halves = [half for half in (tiny.parameters[:cut], tiny.parameters[cut:]) if half]
    optimizers = [torch.optim.SGD(half, lr=1e-3) for half in halves]
    counted = []
    with logged() as messages:
        for step in range(4):
            tiny.exchange(tiny.random_gradients(step))
            for optimizer in optimizers:
                optimizer.step()
            report = megatron_patch.report(tiny.ddp)
            counted.append(
                (state.ledger.steps, state.ledger.steps_seen, report.step, report.gradient_bytes > 0)
            )
    stranger = torch.nn.Linear(2, 2)
    stranger(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(stranger.parameters(), lr=1.0).step()
    found = {
        "counted": counted,
        "after": state.ledger.steps,
        "warnings": [m for m in messages if "WARN" in m],
    }
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("several", [False, True])
def test_steps_of_torch_s_own_optimizers_are_counted_as_they_happen(pool, several):
    for found in pool.run(torch_optimizers, several):
        assert found["counted"] == [(n, n, n, True) for n in range(1, 5)]
        assert found["after"] == 4, "another model's optimizer counts nothing"
        assert found["warnings"] == []


def without_optimizer(model: dict[str, Any], exchanges: int) -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(model, {"reset_interval": 3})
    report: dict[str, Any] = {"shards": [], "errors": [], "gradients": []}
    with logged() as messages:
        for step in range(exchanges):
            gradients = tiny.random_gradients(step)
            report["shards"].append(tiny.exchange(gradients))
            report["errors"].append(errors_of(compressor))
            report["gradients"].append(scaled(tiny, gradients))
    report["steps"] = compressor.ledger.steps
    report["resets"] = compressor.ledger.events.resets
    report["replays"] = compressor.ledger.events.replays
    report["labels"] = labels_of(tiny)
    report["messages"] = [m for m in messages if m.startswith("WARNING")]
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "several groups"])
def test_a_loop_without_megatron_s_optimizer_counts_exchanges_and_says_so_once(pool, model):
    exchanges = 24
    reports = pool.run(without_optimizer, model, exchanges)
    for bucket in range(len(reports[0]["shards"][0])):
        numel = reports[0]["gradients"][0][bucket].numel()
        agreement = Agreement(
            LoCoSimulation(RANKS, numel, bits=4, reset_interval=3, labels=reports[0]["labels"][bucket])
        )
        for step in range(exchanges):
            rows = {
                name: np.stack([r[name][step][bucket].numpy() for r in reports])
                for name in ("gradients", "errors", "shards")
            }
            agreement.exchange(rows["gradients"], shards=rows["shards"])
            # A reset shows with the next exchange only: nothing tells that a step is over before it.
            late = (step + 1) % 3 == 0
            agreement.end_step(errors=None if late else rows["errors"])
    for report in reports:
        assert report["steps"] == exchanges - 1
        assert report["resets"] == 7
        assert report["replays"] == 0
    (message,) = reports[0]["messages"]
    assert "no step of an optimizer was seen in 20 exchanges: exchanges count as steps" in message
    assert not any(report["messages"] for report in reports[1:])


def loss_scale(window: int, error_dtype: str) -> dict[str, Any]:
    import torch

    import megatron_patch

    options = {
        "initial_loss_scale": 64.0,
        "min_loss_scale": 1.0,
        "loss_scale_window": window,
        "hysteresis": 1,
    }
    model = {"dtypes": ("float16",), "optimizer": options}
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
    report["events"] = {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)}
    megatron_patch.disable()
    return report


@pytest.mark.parametrize(("window", "error_dtype"), [(2, "int8"), (1, "int8"), (1, "fp32")])
def test_errors_follow_the_loss_scale_of_fp16(pool, window, error_dtype):
    for report in pool.run(loss_scale, window, error_dtype):
        assert report["overflow"] == [False, False, False, True, False]
        changed = [after != before for before, after in report["scales"]]
        assert changed[3], "an overflow halves the scale"
        assert changed[:3] == ([True, True, True] if window == 1 else [False, True, False])
        assert report["follows"] == [True] * 5
        assert report["events"]["skipped_steps"] == 1


def wire_report() -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(SEVERAL, {"bits": 4})
    tiny.step(tiny.random_gradients(0))
    tiny.step(tiny.random_gradients(1))
    import torch.distributed as dist

    sizes = [sender.layout.payload_sizes for sender in compressor.senders]
    payloads = sum(sum(each) - each[dist.get_rank()] for each in sizes)
    elements = sum(bucket.grad_data.numel() * 3 / 4 for bucket in tiny.buckets)
    report = {
        "nbytes": compressor.report.traffic.nbytes == payloads,
        "elements": compressor.report.traffic.elements == elements,
        "statistics": bool((compressor.report.statistics[:4] > 0).all()),
        "error bytes": compressor.error_bytes == sum(s.error.nbytes for s in compressor.senders) > 0,
    }
    megatron_patch.disable()
    return report


def test_the_report_holds_one_step_s_payload_bytes(pool):
    for report in pool.run(wire_report):
        assert report == dict.fromkeys(report, True)


def buffers(compression: dict[str, Any]) -> dict[str, Any]:
    """Bytes of buffers after three steps of a model of several buckets."""
    import megatron_patch

    tiny, compressor = built(MANY, compression)
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    payloads = [s.layout.shards * s.layout.payload_bytes for s in compressor.senders]
    megatron_patch.disable()
    return {"buckets": len(payloads), "largest": max(payloads), "buffers": compressor.workspace.nbytes}


@pytest.mark.parametrize("topology", ["flat", "two_hop"])
def test_two_buckets_payloads_are_held_at_most(pool, topology):
    """Sending and receiving, for two buckets, and one that is packed; in two hops, one node's sum beside."""
    for report in pool.run(buffers, {"bits": 8, "ranks_per_node": 2, "topology": topology}):
        assert report["buckets"] >= 4
        sums = 4 * report["largest"] if topology == "two_hop" else 0
        assert report["largest"] * 2 <= report["buffers"] <= 5 * report["largest"] + sums
