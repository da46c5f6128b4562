"""The gradients' seam: forced, accumulated and repeated exchanges, when they start, and over which ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from with_megatron.seam_runs import SEVERAL, any_error, built, errors_of, same, scaled

import megatron_patch


def unsupported_release() -> list[str]:
    """A start_grad_sync that no longer calls the global that is substituted; and one that raises."""
    from megatron.core.distributed import param_and_grad_buffer

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


def forced() -> dict[str, Any]:
    tiny, compressor = built(SEVERAL, {"bits": 4})
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
    return report


def test_force_all_reduce_is_exact_and_leaves_the_errors(pool):
    for report in pool.run(forced):
        assert report["exact"]
        assert report["untouched"]
        assert report["syncs"] == report["groups"]
        assert report["wire"] == report["stock wire"]
        assert report["steps"] == 3


def dispatch_times() -> dict[str, Any]:
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
    return {"phases": phases, "handles": handles, "groups": len(tiny.groups)}


def test_the_first_batch_is_sent_at_the_end_and_later_ones_during_the_backward_pass(pool):
    for report in pool.run(dispatch_times):
        groups = report["groups"]
        assert groups >= 3
        assert report["phases"] == [["finish"] * groups, ["backward"] * groups, ["backward"] * groups]
        assert report["handles"][0] == ["NoneType"] * groups
        assert report["handles"][1] == ["_AllHandles"] * groups


def offloaded(offload: bool) -> dict[str, Any]:
    tiny, _ = built(SEVERAL, {"bits": 4})
    shards = []
    for step in range(4):
        shards.append(tiny.step(tiny.random_gradients(step)))
        if offload:
            tiny.ddp.offload_grad_buffers()
            tiny.ddp.restore_grad_buffers()
    return {"shards": shards, "weights": tiny.weights()}


def test_grad_buffers_may_be_freed_and_allocated_again(pool):
    for mine, theirs in zip(pool.run(offloaded, True), pool.run(offloaded, False), strict=True):
        assert same(mine, theirs)


def other_threads() -> list[str]:
    """In a worker: what another thread's exchange reaches while this one's is recorded."""
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
