"""Switching on and off: attach, enable, disable; what is refused, and a single rank.

On Megatron's real DDP, buckets and distributed optimizer (tiny_model.py), 4 ranks unless said otherwise.
"""

from __future__ import annotations

import enum
from typing import Any

import pytest
from with_megatron.seam_runs import SEVERAL, built, logged, same, trained

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
        assert loco["bits"] < 9, "tiny payloads have more padding and scales than 4.125 bits"


def attach_and_disable() -> dict[str, Any]:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

    import megatron_patch
    from megatron_patch import CompressionConfig, UserError
    from megatron_patch.megatron.attach import session_of

    classes = (ChainedOptimizer, MixedPrecisionOptimizer, FP32Optimizer)
    stock_steps = [cls.step for cls in classes]
    tiny, _ = built(SEVERAL, None)
    config = CompressionConfig(method="loco", bits=2, start_step=0)
    report: dict[str, Any] = {}
    chunks = [tiny.ddp]
    report["returns its argument"] = megatron_patch.attach(chunks, config) is chunks
    compressor = session_of(tiny.ddp)
    methods = [group.start_grad_sync for group in tiny.groups]
    report["overridden"] = all("start_grad_sync" in vars(group) for group in tiny.groups)
    report["listening"] = [cls.step for cls in classes] != stock_steps
    wrapped_steps = [cls.step for cls in classes]

    tiny.step(tiny.random_gradients(0))
    megatron_patch.attach(tiny.ddp, CompressionConfig(method="loco", bits=2, start_step=0))
    report["idempotent"] = (
        session_of(tiny.ddp) is compressor
        and [group.start_grad_sync for group in tiny.groups] == methods
        and [cls.step for cls in classes] == wrapped_steps
        and compressor.ledger.steps == 1
    )
    try:
        megatron_patch.attach([tiny.ddp], CompressionConfig(method="loco", bits=4, start_step=0))
    except UserError as error:
        report["refusal"] = str(error)
    tiny.step(tiny.random_gradients(1))
    report["steps"] = compressor.ledger.steps

    megatron_patch.disable()
    report["restored"] = (
        not any("start_grad_sync" in vars(group) for group in tiny.groups)
        and [cls.step for cls in classes] == stock_steps
        and session_of(tiny.ddp) is None
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
    report["counted after"] = compressor.ledger.steps
    megatron_patch.attach(tiny.ddp, CompressionConfig(method="loco", bits=4, start_step=0))
    report["attached anew"] = session_of(tiny.ddp).config.bits
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
    from megatron_patch.megatron.attach import session_of

    stock = DistributedDataParallel.__init__
    report: dict[str, Any] = {"attached": trained(SEVERAL, {"bits": 2})}
    megatron_patch.enable(CompressionConfig(bits=8, start_step=0))
    megatron_patch.enable(CompressionConfig(method="loco", bits=2, start_step=0))
    report["name"] = DistributedDataParallel.__init__.__name__
    report["wrapped once"] = DistributedDataParallel.__init__.__wrapped__ is stock
    tiny, compressor = built(SEVERAL, {}, attached=False)
    report["bits"] = compressor.config.bits
    report["shards"] = [tiny.step(tiny.random_gradients(step)) for step in range(5)]
    report["weights"] = tiny.weights()
    report["steps"] = compressor.ledger.steps
    megatron_patch.disable()
    report["unwrapped"] = DistributedDataParallel.__init__ is stock
    later, none = built({}, {}, attached=False)
    report["later is stock"] = none is None and "start_grad_sync" not in vars(later.groups[0])
    report["earlier is detached"] = session_of(tiny.ddp) is None
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
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    answers = {}
    sharded, experts = build().ddp, build().ddp
    sharded.config.tensor_parallel_num_weight_shards = 2
    experts.config.tensor_parallel_num_weight_shards = 1
    experts.config.expert_tensor_parallel_num_weight_shards = 2
    megatron_patch.attach(
        [sharded], megatron_patch.CompressionConfig(method="none")
    )  # no gradient compressed
    assert session_of(sharded) is not None
    megatron_patch.disable()
    graphs, older_graphs = build().ddp, build().ddp
    graphs.config.cuda_graph_impl = "full_iteration"
    older_graphs.config.cuda_graph_impl = "local"
    older_graphs.config.cuda_graph_scope = [enum.Enum("CudaGraphScope", ["full_iteration"]).full_iteration]
    for name, chunk in (
        ("tensor_parallel_num_weight_shards", sharded),
        ("expert_tensor_parallel_num_weight_shards", experts),
        ("cuda_graph_impl", graphs),
        ("cuda_graph_scope", older_graphs),
        ("Linear", torch.nn.Linear(2, 2)),
    ):
        try:
            megatron_patch.attach([chunk])
        except megatron_patch.UserError as error:
            answers[name] = str(error)
        assert session_of(chunk) is None
    megatron_patch.disable()
    return answers


def test_what_cannot_be_served_is_refused_by_name(pool):
    (answers,) = pool.run(refusals, world_size=1)
    assert set(answers) == {
        "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "Linear",
    }
    for name, message in answers.items():
        assert name in message
        assert "\n" not in message
    assert "DistributedDataParallel" in answers["Linear"]


def gradients_in_fp64(method: str) -> str:
    from megatron.core.distributed import DistributedDataParallel
    from with_megatron.tiny_model import build

    import megatron_patch

    tiny = build(grad_reduce_in_fp32=False)
    ddp = DistributedDataParallel(tiny.ddp.config, tiny.ddp.ddp_config, tiny.ddp.module.double())
    try:
        megatron_patch.attach([ddp], megatron_patch.CompressionConfig(method=method, start_step=0))
        ddp([gradient.double() for gradient in tiny.random_gradients(0)]).backward()
        ddp.finish_grad_sync()
    except megatron_patch.UserError as error:
        return str(error)
    finally:
        megatron_patch.disable()
    return "trained"


def test_gradients_in_fp64_are_refused_when_they_are_attached_unless_none_is_compressed(pool):
    for told in pool.run(gradients_in_fp64, "loco", world_size=2):
        assert told.startswith("gradients in torch.float64 cannot be compressed")
        assert "grad_reduce_in_fp32" in told
    assert pool.run(gradients_in_fp64, "none", world_size=2) == ["trained"] * 2
    assert pool.run(gradients_in_fp64, "loco", world_size=1) == ["trained"]


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
