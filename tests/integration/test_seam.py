"""The seam in Megatron: switching on and off, what is refused, and steps out of the ordinary.

All on Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from typing import Any

import numpy as np
import pytest
from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation

RANKS = 4
SEVERAL = {"overlap": True, "bucket_size": 300}
MANY = {"overlap": True, "bucket_size": 100}
STOCK = None


# --- helpers for the workers -----------------------------------------------------------------------------


def built(
    model: dict[str, Any], compression: dict[str, Any] | None, attached: bool = True
) -> tuple[Any, Any]:
    """(tiny model, its compressor); `compression` None is stock Megatron."""
    from integration.tiny_model import build

    import megatron_patch
    from megatron_patch.integration.attach import chunk_state_of

    tiny = build(**model)
    if compression is None:
        return tiny, None
    if attached:
        megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(**compression))
    return tiny, chunk_state_of(tiny.ddp)


def errors_of(compressor: Any) -> list[Any]:
    """decode(e) of every bucket, flat."""
    return [s.layout.join(s.error.decode()).reshape(-1).clone() for s in compressor.senders]


def any_error(compressor: Any) -> bool:
    return any(bool(error.any()) for error in errors_of(compressor))


def scaled(tiny: Any, gradients: list[Any]) -> list[Any]:
    """What enters the exchange of each bucket."""
    buckets = tiny.in_buckets(gradients)
    return [g * b.gradient_scaling_factor for g, b in zip(buckets, tiny.buckets, strict=True)]


@contextlib.contextmanager
def rerunning() -> Any:
    """Megatron's rerun state machine as it is while a backward pass runs again."""
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    before = machine.state
    machine.state = RerunState.RERUNNING_IN_PLACE
    try:
        yield
    finally:
        machine.state = before


@contextlib.contextmanager
def logged() -> Any:
    """The messages that megatron_patch logs in the block."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname}: {record.getMessage()}")

    handler, logger = Handler(), logging.getLogger("megatron_patch")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def trained(model: dict[str, Any], compression: dict[str, Any] | None, steps: int = 5) -> dict[str, Any]:
    """Shards of every step and the weights after the last."""
    import megatron_patch

    tiny, compressor = built(model, compression)
    shards = [tiny.step(tiny.random_gradients(step)) for step in range(steps)]
    report = {"shards": shards, "weights": tiny.weights()}
    if compressor is not None:
        report["events"] = compressor.describe()
        report["bits"] = compressor.report.traffic.bits_per_element
    megatron_patch.disable()
    return report


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two `trained` runs agree bit for bit."""
    pairs = [
        (a, b)
        for x, y in zip(mine["shards"], theirs["shards"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    pairs.append((mine["weights"], theirs["weights"]))
    return all(np.array_equal(a.float().numpy(), b.float().numpy()) for a, b in pairs)


# --- switching on and off --------------------------------------------------------------------------------

MODELS = [
    {},
    SEVERAL,
    {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False},
    {"dtypes": ("float32", "bfloat16"), "grad_reduce_in_fp32": False, "single_group": True, "overlap": True},
]


def stock_and_none(model: dict[str, Any]) -> tuple[Any, Any, Any]:
    return trained(model, None), trained(model, {"method": "none"}), trained(model, {"method": "loco"})


@pytest.mark.parametrize("model", MODELS, ids=["plain", "several", "bf16", "mixed"])
def test_method_none_is_bit_identical_to_stock_megatron(pool, model):
    for stock, none, loco in pool.run(stock_and_none, model):
        assert same(stock, none)
        assert not same(stock, loco), "the comparison can fail"
        assert none["events"]["uncompressed_syncs"] == 0
        assert 16 <= none["bits"] <= 32
        assert loco["bits"] < 6, "tiny payloads have more padding than 4.125 bits"


def attach_and_disable() -> dict[str, Any]:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

    import megatron_patch
    from megatron_patch import CompressionConfig, UserError
    from megatron_patch.integration.attach import chunk_state_of

    classes = (ChainedOptimizer, MixedPrecisionOptimizer, FP32Optimizer)
    stock_steps = [cls.step for cls in classes]
    tiny, _ = built(SEVERAL, None)
    config = CompressionConfig(bits=2)
    report: dict[str, Any] = {}
    chunks = [tiny.ddp]
    report["returns its argument"] = megatron_patch.attach(chunks, config) is chunks
    compressor = chunk_state_of(tiny.ddp)
    methods = [group.start_grad_sync for group in tiny.groups]
    report["overridden"] = all("start_grad_sync" in vars(group) for group in tiny.groups)
    report["listening"] = [cls.step for cls in classes] != stock_steps
    wrapped_steps = [cls.step for cls in classes]

    tiny.step(tiny.random_gradients(0))
    megatron_patch.attach(tiny.ddp, CompressionConfig(bits=2))
    report["idempotent"] = (
        chunk_state_of(tiny.ddp) is compressor
        and [group.start_grad_sync for group in tiny.groups] == methods
        and [cls.step for cls in classes] == wrapped_steps
        and compressor.steps == 1
    )
    try:
        megatron_patch.attach([tiny.ddp], CompressionConfig(bits=4))
    except UserError as error:
        report["refusal"] = str(error)
    tiny.step(tiny.random_gradients(1))
    report["steps"] = compressor.steps

    megatron_patch.disable()
    report["restored"] = (
        not any("start_grad_sync" in vars(group) for group in tiny.groups)
        and [cls.step for cls in classes] == stock_steps
        and chunk_state_of(tiny.ddp) is None
    )
    megatron_patch.disable()
    # Same weights, same further gradients, stock exchange: the shards must be the stock ones.
    other, _ = built(SEVERAL, None)
    report["stock again"] = all(
        bool((mine == theirs).all())
        for step in range(2, 4)
        for mine, theirs in zip(
            tiny.exchange(tiny.random_gradients(step)),
            other.exchange(other.random_gradients(step)),
            strict=True,
        )
    )
    report["counted after"] = compressor.steps
    megatron_patch.attach(tiny.ddp, CompressionConfig(bits=4))
    report["attached anew"] = chunk_state_of(tiny.ddp).config.bits
    megatron_patch.disable()
    return report


def test_attaching_is_idempotent_and_disabling_leaves_no_trace(pool):
    for report in pool.run(attach_and_disable):
        assert "already" in report.pop("refusal")
        assert report.pop("steps") == 2
        assert report.pop("counted after") == 2
        assert report.pop("attached anew") == 4
        assert report == dict.fromkeys(report, True)


def enable_and_disable() -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel

    import megatron_patch
    from megatron_patch import CompressionConfig
    from megatron_patch.integration.attach import chunk_state_of

    stock = DistributedDataParallel.__init__
    report: dict[str, Any] = {"attached": trained(SEVERAL, {"bits": 2})}
    megatron_patch.enable(CompressionConfig(bits=8))
    megatron_patch.enable(CompressionConfig(bits=2))
    report["name"] = DistributedDataParallel.__init__.__name__
    report["wrapped once"] = DistributedDataParallel.__init__.__wrapped__ is stock
    tiny, compressor = built(SEVERAL, {}, attached=False)
    report["bits"] = compressor.config.bits
    report["shards"] = [tiny.step(tiny.random_gradients(step)) for step in range(5)]
    report["weights"] = tiny.weights()
    report["steps"] = compressor.steps
    megatron_patch.disable()
    report["unwrapped"] = DistributedDataParallel.__init__ is stock
    later, none = built({}, {}, attached=False)
    report["later is stock"] = none is None and "start_grad_sync" not in vars(later.groups[0])
    report["earlier is detached"] = chunk_state_of(tiny.ddp) is None
    return report


def test_enabling_attaches_what_is_built_later_and_disabling_ends_it(pool):
    for report in pool.run(enable_and_disable):
        # attach after the optimizer was built, enable before: the same numbers.
        assert same(report, report["attached"])
        assert (report["bits"], report["steps"], report["name"]) == (2, 5, "__init__")
        for fact in ("wrapped once", "unwrapped", "later is stock", "earlier is detached"):
            assert report[fact], fact


def refusals() -> dict[str, Any]:
    import torch
    from integration.tiny_model import build
    from megatron.core.distributed import param_and_grad_buffer

    import megatron_patch
    from megatron_patch.integration.attach import chunk_state_of

    answers = {}
    function = param_and_grad_buffer.dist_reduce_scatter_func
    for name, ddp in (
        ("reduce_scatter_with_fp32_accumulation", {"reduce_scatter_with_fp32_accumulation": True}),
    ):
        chunk = build(ddp=ddp).ddp
        param_and_grad_buffer.dist_reduce_scatter_func = function  # Megatron sets it for the whole process
        try:
            megatron_patch.attach([chunk])
        except megatron_patch.UserError as error:
            answers[name] = str(error)
        assert chunk_state_of(chunk) is None
    graphs, older_graphs = build().ddp, build().ddp
    graphs.config.cuda_graph_impl = "full_iteration"
    older_graphs.config.cuda_graph_impl = "local"
    older_graphs.config.cuda_graph_scope = [enum.Enum("CudaGraphScope", ["full_iteration"]).full_iteration]
    for name, chunk in (
        ("cuda_graph_impl", graphs),
        ("cuda_graph_scope", older_graphs),
        ("Linear", torch.nn.Linear(2, 2)),
    ):
        try:
            megatron_patch.attach([chunk])
        except megatron_patch.UserError as error:
            answers[name] = str(error)
    megatron_patch.disable()
    return answers


def test_what_cannot_be_served_is_refused_by_name(pool):
    (answers,) = pool.run(refusals, world_size=1)
    assert set(answers) == {
        "reduce_scatter_with_fp32_accumulation",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "Linear",
    }
    for name, message in answers.items():
        assert name in message
        assert "\n" not in message
    assert "DistributedDataParallel" in answers["Linear"]


def single_rank(compression: dict[str, Any] | None) -> dict[str, Any]:
    with logged() as messages:
        report = trained({}, compression, steps=3)
    return report | {"messages": messages}


def test_a_single_rank_stays_uncompressed_and_says_so(pool):
    (stock,) = pool.run(single_rank, None, world_size=1)
    (alone,) = pool.run(single_rank, {"method": "loco"}, world_size=1)
    assert same(stock, alone)
    assert alone["events"]["steps"] == 3
    assert any(m.startswith("WARNING") and "not compressed" in m for m in alone["messages"])


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
        megatron_patch.attach([tiny.ddp])
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


# --- exchanges out of the ordinary -----------------------------------------------------------------------


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
        "syncs": compressor.events.uncompressed_syncs,
    }
    tiny.optimizer.step()
    report["wire"] = compressor.report.traffic.nbytes
    report["stock wire"] = sum(2 * 4 * bucket.grad_data.numel() * 3 / 4 for bucket in tiny.buckets)
    report["steps"] = compressor.steps
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
    report["syncs"] = compressor.events.uncompressed_syncs
    report["resets"] = compressor.events.resets
    megatron_patch.disable()
    return report


def test_compression_starts_at_start_step(pool):
    start, steps = 3, 8
    reports = pool.run(delayed, start, steps)
    numel = reports[0]["gradients"][0].numel()
    # Resets count optimizer steps from the very first, so the simulation steps from there as well.
    agreement = Agreement(LoCoSimulation(RANKS, numel, bits=4, reset_interval=start + 2))
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
        assert max(report["bits"][start:]) < 4.5
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
        report["counts"].append((compressor.steps, compressor.steps_seen))
    report["events"] = compressor.describe()
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
            "uncompressed_syncs": 0,
        }


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
    report["events"] = compressor.describe()
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
    report["steps"] = compressor.steps
    report["resets"] = compressor.events.resets
    report["replays"] = compressor.events.replays
    report["messages"] = [m for m in messages if m.startswith("WARNING")]
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "several groups"])
def test_a_loop_without_megatron_s_optimizer_counts_exchanges_and_says_so_once(pool, model):
    exchanges = 8
    reports = pool.run(without_optimizer, model, exchanges)
    for bucket in range(len(reports[0]["shards"][0])):
        numel = reports[0]["gradients"][0][bucket].numel()
        # Without the error after a reset, every tie counts as decided the other way.
        agreement = Agreement(LoCoSimulation(RANKS, numel, bits=4, reset_interval=3), forks=0.1)
        for step in range(exchanges):
            rows = {
                name: np.stack([r[name][step][bucket].numpy() for r in reports])
                for name in ("gradients", "errors", "shards")
            }
            # A reset shows with the next exchange only: nothing tells that a step is over before it.
            late = (step + 1) % 3 == 0
            agreement.check(rows["gradients"], errors=None if late else rows["errors"], shards=rows["shards"])
    for report in reports:
        assert report["steps"] == exchanges - 1
        assert report["resets"] == 2
        assert report["replays"] == 0
        (message,) = report["messages"]
        assert "counting exchanges as steps" in message


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
    report["events"] = compressor.describe()
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


def poisoned(value: float, element: int) -> dict[str, Any]:
    """Rank 1 has one element that is not finite, in the second step."""
    import torch.distributed as dist

    import megatron_patch

    tiny, compressor = built({}, {"block_size": 64})
    tiny.exchange(tiny.random_gradients(0))
    tiny.optimizer.step()
    before = errors_of(compressor)[0]
    gradients = tiny.random_gradients(1)
    if dist.get_rank() == 1:
        gradients[4].view(-1)[element] = value
    (shard,) = tiny.exchange(gradients)
    (bucket,) = tiny.buckets
    report = {
        "shard": shard,
        "before": before,
        "errors": errors_of(compressor)[0],
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
    start = inside // 64 * 64
    stop = min(start + 64, size)
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
    report["steps"] = compressor.steps
    megatron_patch.disable()
    return report


@pytest.mark.parametrize("model", [{}, SEVERAL], ids=["plain", "overlap"])
def test_accumulated_gradients_are_exchanged_once(pool, model):
    steps = 4
    reports = pool.run(accumulated, model, 3, steps)
    buckets = len(reports[0]["shards"][0])
    for bucket in range(buckets):
        agreement = Agreement(LoCoSimulation(RANKS, reports[0]["gradients"][0][bucket].numel(), bits=4))
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


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_same_seed_gives_the_same_bits(pool, rounding):
    seeds = [pool.run(twice, SEVERAL, {"rounding": rounding, "seed": seed}) for seed in (1, 2)]
    for first, second in seeds[0]:
        assert same(first, second)
    others = [same(mine[0], theirs[0]) for mine, theirs in zip(*seeds, strict=True)]
    assert others == [rounding == "nearest"] * RANKS


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


def wire_report() -> dict[str, Any]:
    import megatron_patch

    tiny, compressor = built(SEVERAL, {"bits": 4})
    tiny.step(tiny.random_gradients(0))
    tiny.step(tiny.random_gradients(1))
    payloads = sum(3 * sender.layout.payload_bytes for sender in compressor.senders)
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


# --- other groups of ranks -------------------------------------------------------------------------------


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
    report["shards per bucket"] = [sender.layout.shards for sender in compressor.senders]
    megatron_patch.disable()
    return report


def simulate(reports: list[Any], bucket: int, ranks: list[int], steps: int) -> list[np.ndarray]:
    """Follow one bucket over its ranks, checking their errors; the reduced shards [ranks, shard] per step."""
    agreement = Agreement(
        LoCoSimulation(len(ranks), reports[0]["gradients"][0][bucket].numel(), bits=4, reset_interval=3),
        forks=0,
    )
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
        senders = LoCoSimulation(2, size, bits=4, reset_interval=3)
        owners = [LoCoSimulation(1, size // 2, bits=4, reset_interval=3) for _ in peers]
        for step in range(steps):
            sums = senders.step(np.stack([instance[step][place] for instance in inside]))
            held = [owner.step(half[None]) for owner, half in zip(owners, sums.shards, strict=True)]
            for index, rank in enumerate(peers):
                errors = reports[rank]["errors"][step]
                assert np.array_equal(errors[1].numpy(), sums.errors[index])
                assert np.array_equal(errors[2].numpy(), held[index].errors[0])
                shard = np.concatenate([owner.sent[0] for owner in held])
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


# --- topology and memory ---------------------------------------------------------------------------------


def announced(compression: dict[str, Any], several: bool = False) -> dict[str, Any]:
    """What attaching says, and the bytes of buffers after three steps of a model of several buckets."""
    lines: list[str] = []
    logger = logging.getLogger("megatron_patch.integration.startup_log")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        tiny, compressor = built(MANY if several else {}, compression)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    payloads = [s.layout.shards * s.layout.payload_bytes for s in compressor.senders]
    import megatron_patch

    megatron_patch.disable()
    return {
        "lines": lines,
        "buckets": len(payloads),
        "largest": max(payloads),
        "buffers": compressor.workspace.nbytes,
    }


TOPOLOGIES = {
    "unknown": ({}, None),
    "auto": ({"ranks_per_node": 2}, "reduce-scatter in two hops over 2 nodes of 2 ranks: "),
    "asked for": ({"ranks_per_node": 2, "topology": "two_hop"}, "in two hops over 2 nodes of 2 ranks"),
    "flat": ({"ranks_per_node": 2, "topology": "flat"}, None),
    "one node": ({"ranks_per_node": 4}, None),
    "one node, asked for": (
        {"ranks_per_node": 4, "topology": "two_hop"},
        "one hop, not two, for a group of ranks: all of its ranks are on one node",
    ),
    "irregular": (
        {"ranks_per_node": 3},
        "one hop, not two, for a group of ranks: its ranks lie irregularly on nodes of 3: 3 on node 0, 1 on",
    ),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_topology_is_said_and_so_is_why_not_two_hops(pool, name):
    compression, line = TOPOLOGIES[name]
    report, *others = pool.run(announced, compression)
    assert all(other["lines"] == [] for other in others)
    hops = [text for text in report["lines"] if "hop" in text]
    assert len(hops) == (1 if line else 0)
    if line:
        assert line in hops[0]


@pytest.mark.parametrize("topology", ["flat", "two_hop"])
def test_two_buckets_payloads_are_held_at_most(pool, topology):
    """Sending and receiving, for two buckets; in two hops, one node's sum beside them."""
    for report in pool.run(announced, {"bits": 8, "ranks_per_node": 2, "topology": topology}, True):
        assert report["buckets"] >= 4
        sums = 4 * report["largest"] if topology == "two_hop" else 0
        assert report["largest"] * 2 <= report["buffers"] <= 4 * report["largest"] + sums
