"""Switching on and off: attach, enable, disable; what is refused, and a single rank."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from with_megatron.seam_runs import SEVERAL, built, logged, refusal, same, session_of, trained
from with_megatron.tiny_model import build

import megatron_patch
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError


def attach_and_disable() -> dict[str, Any]:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

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
    with pytest.raises(UserError) as error:
        megatron_patch.attach([tiny.ddp], CompressionConfig(method="loco", bits=4, start_step=0))
    report["refusal"] = str(error.value)
    tiny.step(tiny.random_gradients(1))
    report["steps"] = compressor.ledger.steps

    megatron_patch.disable()
    report["restored"] = (
        not any("start_grad_sync" in vars(group) for group in tiny.groups)
        and [cls.step for cls in classes] == stock_steps
        and session_of(tiny.ddp) is None
    )
    megatron_patch.disable()
    tiny.exchange(tiny.random_gradients(2))
    report["counted after"] = compressor.ledger.steps
    megatron_patch.attach(tiny.ddp, CompressionConfig(method="loco", bits=4, start_step=0))
    report["attached anew"] = session_of(tiny.ddp).config.bits
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

    stock = DistributedDataParallel.__init__
    report: dict[str, Any] = {}
    megatron_patch.enable(CompressionConfig(bits=8, start_step=0))
    megatron_patch.enable(CompressionConfig(bits=2, start_step=0))
    report["name"] = DistributedDataParallel.__init__.__name__ == "__init__"
    report["wrapped once"] = DistributedDataParallel.__init__.__wrapped__ is stock
    tiny, _ = built(SEVERAL, None)
    compressor = session_of(tiny.ddp)
    report["bits"] = compressor.config.bits == 2
    tiny.step(tiny.random_gradients(0))
    report["steps"] = compressor.ledger.steps == 1
    megatron_patch.disable()
    report["unwrapped"] = DistributedDataParallel.__init__ is stock
    later, _ = built({}, None)
    report["later is stock"] = session_of(later.ddp) is None
    report["later is left alone"] = "start_grad_sync" not in vars(later.groups[0])
    report["earlier is detached"] = session_of(tiny.ddp) is None
    return report


def test_enabling_attaches_what_is_built_later_and_disabling_ends_it(pool):
    """That it trains as `attach` does is in test_doors.py."""
    for report in pool.run(enable_and_disable):
        assert report == dict.fromkeys(report, True)


def refusals() -> dict[str, Any]:
    sharded, experts = build().ddp, build().ddp
    sharded.config.tensor_parallel_num_weight_shards = 2
    experts.config.tensor_parallel_num_weight_shards = 1
    experts.config.expert_tensor_parallel_num_weight_shards = 2
    megatron_patch.attach([sharded], CompressionConfig(method="none"))  # no gradient is compressed
    assert session_of(sharded) is not None
    megatron_patch.disable()
    graphs, older_graphs = build().ddp, build().ddp
    graphs.config.cuda_graph_impl = "full_iteration"
    older_graphs.config.cuda_graph_impl = "local"
    older_graphs.config.cuda_graph_scope = [enum.Enum("CudaGraphScope", ["full_iteration"]).full_iteration]
    chunks = {
        "tensor_parallel_num_weight_shards": sharded,
        "expert_tensor_parallel_num_weight_shards": experts,
        "cuda_graph_impl": graphs,
        "cuda_graph_scope": older_graphs,
        "Linear": torch.nn.Linear(2, 2),
    }
    answers = {name: refusal(megatron_patch.attach, [chunk]) for name, chunk in chunks.items()}
    assert not any(session_of(chunk) for chunk in chunks.values())
    return answers


def test_what_cannot_be_served_is_refused_by_name(pool):
    (answers,) = pool.run(refusals, world_size=1)
    for name, message in answers.items():
        assert name in message
        assert "\n" not in message
    assert "DistributedDataParallel" in answers["Linear"]


def gradients_in_fp64(method: str) -> str:
    from megatron.core.distributed import DistributedDataParallel

    tiny = build(grad_reduce_in_fp32=False)
    ddp = DistributedDataParallel(tiny.ddp.config, tiny.ddp.ddp_config, tiny.ddp.module.double())

    def train() -> None:
        megatron_patch.attach([ddp], CompressionConfig(method=method, start_step=0))
        ddp([gradient.double() for gradient in tiny.random_gradients(0)]).backward()
        ddp.finish_grad_sync()

    return refusal(train)


def test_gradients_in_fp64_are_refused_when_they_are_attached_unless_none_is_compressed(pool):
    for told in pool.run(gradients_in_fp64, "loco", world_size=2):
        assert told.startswith("gradients in torch.float64 cannot be compressed")
        assert "grad_reduce_in_fp32" in told
    assert pool.run(gradients_in_fp64, "none", world_size=2) == [""] * 2
    assert pool.run(gradients_in_fp64, "loco", world_size=1) == [""]


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
