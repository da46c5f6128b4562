"""The gradients' seam: forced, accumulated and repeated exchanges, when they start, and over which ranks.

On Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation
from with_megatron.seam_runs import (
    RANKS,
    SEVERAL,
    any_error,
    built,
    errors_of,
    labels_of,
    same,
    scaled,
    trained,
)


def unsupported_release() -> list[str]:
    """A start_grad_sync that no longer calls the global that is substituted; and one that raises."""
    from megatron.core.distributed import param_and_grad_buffer

    import megatron_patch

    stock = param_and_grad_buffer.dist_reduce_scatter_func, param_and_grad_buffer.torch
    tiny, _ = built({}, None)
    (group,) = tiny.groups
    answers = []
    for start in (lambda force_all_reduce=False: None, lambda force_all_reduce=False: 1 / 0):
        group.start_grad_sync = start
        megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(start_step=0))
        try:
            tiny.exchange(tiny.random_gradients(0))
        except (RuntimeError, ZeroDivisionError) as error:
            answers.append(str(error))
        assert (param_and_grad_buffer.dist_reduce_scatter_func, param_and_grad_buffer.torch) == stock
        megatron_patch.disable()
    return answers


def test_a_release_that_bypasses_the_seam_is_an_error_and_the_global_is_always_restored(pool):
    for unsupported, raised in pool.run(unsupported_release):
        assert "megatron.core.distributed.param_and_grad_buffer" in unsupported
        assert "0 reduce-scatters and 0 all-reduces" in unsupported
        assert "not 1 and 0" in unsupported
        assert "division" in raised


def forced(model: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    import megatron_patch

    tiny, compressor = built(model, {"bits": 4})
    for step in range(2):
        tiny.step(tiny.random_gradients(step))
    before = errors_of(compressor)
    gradients = tiny.random_gradients(2)
    tiny.ddp.zero_grad_buffer()
    tiny.ddp.force_all_reduce = True  # what the backward hooks of later batches pass on
    tiny.backward(gradients)
    tiny.ddp.finish_grad_sync(force_all_reduce=True)
    tiny.ddp.force_all_reduce = False
    exact = scaled(tiny, gradients)
    for bucket in exact:
        dist.all_reduce(bucket)
    report = {
        "exact": all(bool((b.grad_data == e).all()) for b, e in zip(tiny.buckets, exact, strict=True)),
        "untouched": all(bool((a == b).all()) for a, b in zip(before, errors_of(compressor), strict=True))
        and any_error(compressor),
        "groups": len(tiny.groups),
        "syncs": compressor.ledger.events.uncompressed_syncs,
    }
    tiny.optimizer.step()
    report["wire"] = compressor.report.traffic.nbytes
    report["stock wire"] = sum(2 * 4 * bucket.grad_data.numel() * 3 / 4 for bucket in tiny.buckets)
    report["steps"] = compressor.ledger.steps
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "overlap"])
def test_force_all_reduce_is_exact_and_leaves_the_errors(pool, model):
    for report in pool.run(forced, model):
        assert report["exact"]
        assert report["untouched"]
        assert report["syncs"] == report["groups"]
        assert report["wire"] == report["stock wire"]
        assert report["steps"] == 3


def poisoned(value: float, element: int) -> dict[str, Any]:
    """Rank 1 has one element that is not finite, in the second step."""
    import torch
    import torch.distributed as dist

    import megatron_patch

    tiny, compressor = built({}, {"block_size": 64})

    def gradients_of(step: int) -> list[Any]:
        gradients = tiny.random_gradients(step)
        gradients[4] += 1e-3 * (1 + torch.arange(gradients[4].numel()) % 7).view_as(gradients[4])  # no zeros
        return gradients

    tiny.exchange(gradients_of(0))
    tiny.optimizer.step()
    before = errors_of(compressor)[0]
    gradients = gradients_of(1)
    if dist.get_rank() == 1:
        gradients[4].view(-1)[element] = value
    (shard,) = tiny.exchange(gradients)
    (bucket,) = tiny.buckets
    report = {
        "shard": shard,
        "before": before,
        "errors": errors_of(compressor)[0],
        "labels": labels_of(tiny, 64)[0],
        "place": bucket.param_to_index[tiny.parameters[4]][0] + element,
        "non_finite": compressor.senders[0].statistics[-1].item(),
    }
    megatron_patch.disable()
    return report


@pytest.mark.parametrize(("value", "element"), [(float("nan"), 200), (float("inf"), 0), (-float("inf"), 300)])
def test_the_owner_sees_nan_in_that_block_and_the_sender_keeps_its_error(pool, value, element):
    reports = pool.run(poisoned, value, element)
    size = reports[0]["shard"].numel()
    owner, inside = divmod(reports[0]["place"], size)
    labels = reports[0]["labels"].reshape(-1, size)[owner]
    (of_block,) = np.nonzero(labels == labels[inside])
    start, stop = of_block[0], of_block[-1] + 1
    for rank, report in enumerate(reports):
        expected = np.zeros(size, dtype=bool)
        if rank == owner:
            expected[start:stop] = True
        assert np.array_equal(np.isnan(report["shard"].numpy()), expected)
        assert np.isfinite(report["shard"].numpy()[~expected]).all()
        kept = report["errors"].numpy() == report["before"].numpy()
        block = slice(owner * size + start, owner * size + stop)
        assert np.isfinite(report["errors"].numpy()).all()
        assert report["before"].numpy()[block].any()
        assert kept[block].all() == (rank == 1)
        assert not kept.all(), "the other blocks go on"
        assert report["non_finite"] == (rank == 1)


def accumulated(model: dict[str, Any], microbatches: int, steps: int) -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(model, {"bits": 4})
    calls = [0]
    exchange = compressor.start

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return exchange(*args, **kwargs)

    compressor.start = counting
    report: dict[str, Any] = {"shards": [], "errors": [], "gradients": [], "calls": []}
    report["labels"] = labels_of(tiny)
    for step in range(steps):
        tiny.ddp.zero_grad_buffer()
        calls[0] = 0
        total = [bucket * 0 for bucket in tiny.in_buckets(tiny.random_gradients(0))]
        for microbatch in range(microbatches):
            gradients = tiny.random_gradients(100 * step + microbatch)
            last = microbatch == microbatches - 1
            with contextlib.nullcontext() if last else tiny.ddp.no_sync():
                tiny.backward(gradients)
            total = [t + g for t, g in zip(total, tiny.in_buckets(gradients), strict=True)]
        tiny.ddp.finish_grad_sync()
        report["calls"].append(calls[0])
        report["shards"].append(tiny.shards())
        report["errors"].append(errors_of(compressor))
        report["gradients"].append([t / RANKS for t in total])
        tiny.optimizer.step()
    report["steps"] = compressor.ledger.steps
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "overlap"])
def test_accumulated_gradients_are_exchanged_once(pool, model):
    steps = 4
    reports = pool.run(accumulated, model, 3, steps)
    buckets = len(reports[0]["shards"][0])
    for bucket in range(buckets):
        labels = reports[0]["labels"][bucket]
        agreement = Agreement(LoCoSimulation(RANKS, len(labels), bits=4, labels=labels))
        for step in range(steps):
            rows = {
                name: np.stack([r[name][step][bucket].numpy() for r in reports])
                for name in ("gradients", "errors", "shards")
            }
            agreement.check(rows["gradients"], errors=rows["errors"], shards=rows["shards"])
    for report in reports:
        assert report["calls"] == [buckets] * steps
        assert report["steps"] == steps


def dispatch_times() -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(SEVERAL, {"bits": 4})
    phases: list[list[str]] = []
    phase = ["backward"]
    exchange = compressor.start

    def note(*args: Any, **kwargs: Any) -> Any:
        phases[-1].append(phase[0])
        return exchange(*args, **kwargs)

    compressor.start = note
    handles = []
    for step in range(3):
        phases.append([])
        tiny.ddp.zero_grad_buffer()
        phase[0] = "backward"
        tiny.backward(tiny.random_gradients(step))
        handles.append([type(group.grad_reduce_handle).__name__ for group in tiny.groups])
        phase[0] = "finish"
        tiny.ddp.finish_grad_sync()
        if hasattr(tiny.ddp.bucket_groups[0], "grad_reduce_finished"):  # upstream's, from 0.18 on
            tiny.ddp.finish_grad_sync()  # idempotent
        assert all(group.grad_reduce_handle is None for group in tiny.groups)
        tiny.optimizer.step()
    megatron_patch.disable()
    return {"phases": phases, "handles": handles, "groups": len(tiny.groups)}


def test_the_first_batch_is_sent_at_the_end_and_later_ones_during_the_backward_pass(pool):
    for report in pool.run(dispatch_times):
        groups = report["groups"]
        assert groups >= 3
        assert report["phases"] == [["finish"] * groups, ["backward"] * groups, ["backward"] * groups]
        assert report["handles"][0] == ["NoneType"] * groups
        assert report["handles"][1] == ["_AllHandles"] * groups


def twice(model: dict[str, Any], compression: dict[str, Any]) -> tuple[Any, Any]:
    return trained(model, compression), trained(model, compression)


def test_a_run_gives_the_same_bits_again(pool):
    for first, second in pool.run(twice, SEVERAL, {}):
        assert same(first, second)


def offloaded(offload: bool) -> dict[str, Any]:
    import megatron_patch

    tiny, _ = built(SEVERAL, {"bits": 4})
    shards = []
    for step in range(4):
        shards.append(tiny.step(tiny.random_gradients(step)))
        if offload:
            tiny.ddp.offload_grad_buffers()
            tiny.ddp.restore_grad_buffers()
    megatron_patch.disable()
    return {"shards": shards, "weights": tiny.weights()}


def test_grad_buffers_may_be_freed_and_allocated_again(pool):
    for mine, theirs in zip(pool.run(offloaded, True), pool.run(offloaded, False), strict=True):
        assert same(mine, theirs)


def grouped(model: dict[str, Any], steps: int) -> dict[str, Any]:
    """Per bucket: its group of ranks, and per step the gradients that enter it and what comes out."""
    import torch.distributed as dist

    import megatron_patch

    tiny, compressor = built(model, {"bits": 4, "reset_interval": 3})
    report: dict[str, Any] = {"shards": [], "errors": [], "gradients": [], "groups": []}
    for group in tiny.groups:
        ranks = dist.get_process_group_ranks(group.intra_distributed_optimizer_instance_group)
        report["groups"] += [ranks for _ in group.buckets]
    for step in range(steps):
        gradients = tiny.random_gradients(step)
        report["gradients"].append(scaled(tiny, gradients))
        report["shards"].append(tiny.step(gradients))
        report["errors"].append(errors_of(compressor))
    report["labels"] = labels_of(tiny)
    report["shards per bucket"] = [sender.layout.shards for sender in compressor.senders]
    megatron_patch.disable()
    return report


def simulate(reports: list[Any], bucket: int, ranks: list[int], steps: int) -> list[np.ndarray]:
    """Follow one bucket over its ranks, checking their errors; the reduced shards [ranks, shard] per step."""
    labels = reports[0]["labels"][bucket]
    agreement = Agreement(LoCoSimulation(len(ranks), len(labels), bits=4, reset_interval=3, labels=labels))
    shards = []
    for step in range(steps):
        rows = {
            name: np.stack([reports[rank][name][step][bucket].numpy() for rank in ranks])
            for name in ("gradients", "errors")
        }
        shards.append(agreement.check(rows["gradients"], sent=None, errors=rows["errors"]).shards)
    return shards


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_two_optimizer_instances_are_compressed_inside_and_between(pool, overlap):
    steps = 5
    reports = pool.run(grouped, {"instances": 2, "overlap": overlap}, steps)
    instances = sorted({tuple(report["groups"][0]) for report in reports})
    assert [len(instance) for instance in instances] == [2, 2]
    assert reports[0]["shards per bucket"] == [2, 2, 1], "scatter inside, then sender and owner between"
    inside = [simulate(reports, 0, list(instance), steps) for instance in instances]
    size = inside[0][0].shape[1]
    for place, peers in enumerate(zip(*instances, strict=True)):
        labels = reports[0]["labels"][0][place * size : (place + 1) * size]
        senders = LoCoSimulation(2, size, bits=4, reset_interval=3, labels=labels, last=False)
        owners = [
            LoCoSimulation(1, size // 2, bits=4, reset_interval=3, labels=half, first=False)
            for half in labels.reshape(len(peers), -1)
        ]
        for step in range(steps):
            sums = senders.step(np.stack([instance[step][place] for instance in inside]))
            held = [owner.step(half[None]) for owner, half in zip(owners, sums.shards, strict=True)]
            for index, rank in enumerate(peers):
                errors = reports[rank]["errors"][step]
                assert np.array_equal(errors[1].numpy(), sums.errors[index])
                assert np.array_equal(errors[2].numpy(), held[index].errors[0])
                shard = np.concatenate([owner.shards[0] for owner in held])
                assert np.array_equal(reports[rank]["shards"][step][0].numpy(), shard)


def test_experts_are_compressed_over_their_own_ranks(pool):
    steps = 5
    reports = pool.run(grouped, {"experts": (1, 4), "expert_parallel": 2}, steps)
    assert [len(group) for group in reports[0]["groups"]] == [4, 2]
    assert reports[0]["shards per bucket"] == [4, 2]
    for bucket in (0, 1):
        for group in {tuple(report["groups"][bucket]) for report in reports}:
            simulated = simulate(reports, bucket, list(group), steps)
            for step in range(steps):
                for place, rank in enumerate(group):
                    assert np.array_equal(
                        reports[rank]["shards"][step][bucket].numpy(), simulated[step][place]
                    )


def other_threads() -> list[str]:
    """In a worker: what another thread's exchange reaches while this one's is recorded."""
    import threading

    from megatron.core.distributed import param_and_grad_buffer

    from megatron_patch.megatron import patching, symbols
    from megatron_patch.megatron.seams.intercept import intercepted

    found: list[str] = []

    def stock(*_: Any, **__: Any) -> None:
        found.append("upstream's")

    def exchange() -> None:
        param_and_grad_buffer.dist_reduce_scatter_func(None, None)

    def recorded() -> None:
        with intercepted() as calls:
            exchange()
        found.append(f"recorded {len(calls.reduce_scatter)}")

    with patching.swapped({symbols.REDUCE_SCATTER: stock}):
        with intercepted() as calls:
            exchange()
            plain, ours = threading.Thread(target=exchange), threading.Thread(target=recorded)
            plain.start()
            plain.join()
            ours.start()  # which waits until this thread's is over
            ours.join(0.2)
            found.append(f"recorded {len(calls.reduce_scatter)}")
        ours.join()
        exchange()
    return found


def test_another_thread_s_exchange_is_not_recorded(pool):
    assert pool.run(other_threads, world_size=1) == [["upstream's", "recorded 1", "recorded 1", "upstream's"]]
