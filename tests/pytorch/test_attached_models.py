"""Attached models are freed with their last reference; copies of them have nothing attached."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_values import flat_error
from pytorch.runs import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from with_megatron.seam_runs import logged

import megatron_patch
from megatron_patch.pytorch import attach

OPTIONS = {"method": "loco", "start_step": 0, "reset_interval": 0}


def wrapped(kind: str, replicas: int = 1, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) if model is None else model
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def left_alive(kind: str) -> tuple[bool, int]:
    model = megatron_patch.attach(wrapped(kind), megatron_patch.CompressionConfig(**OPTIONS))
    there = weakref.ref(model)
    del model
    gc.collect()
    found = there() is not None, len(attach.sessions(None))
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_model_is_freed_with_its_last_reference(pool, kind) -> None:
    assert pool.run(left_alive, kind, world_size=2) == [(False, 0)] * 2


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"megatron_patch" not in file.getvalue(), "it can be loaded without this package"
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "saved": saved_and_loaded,
}


def copied(how: str) -> tuple[list[bool], bool, bool]:
    """Whether model, copy, and the copy attached by itself are attached; whether the copy was stock."""
    model = megatron_patch.attach(wrapped("ddp"), megatron_patch.CompressionConfig(**OPTIONS))
    stock, gradients = wrapped("ddp"), []
    for _ in range(2):
        model(torch.ones(8, 64)).square().mean().backward()
    other = COPIES[how](model)
    other.zero_grad()
    for each in (other, stock):
        for _ in range(2):
            each(torch.full((8, 64), 1.0 + dist.get_rank())).square().mean().backward()
        gradients.append([p.grad.clone() for p in each.parameters()])
    there = [attach.attachment_of(each) is not None for each in (model, other)]
    megatron_patch.attach(other, megatron_patch.CompressionConfig(**OPTIONS))
    apart = attach.attachment_of(model) is not attach.attachment_of(other)
    megatron_patch.disable()
    return there, apart, all(map(np.array_equal, *gradients))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_nothing_attached(pool, how: str) -> None:
    assert pool.run(copied, how, world_size=2) == [([True, False], True, True)] * 2


def overflows_at_the_start() -> list[tuple[float, int, int, float]]:
    """A scale that is too large at first: pending errors, steps seen and skipped, bytes of the last step."""
    model = megatron_patch.attach(wrapped("fsdp2"), megatron_patch.CompressionConfig(**OPTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    attachment, told = attach.attachment_of(model), []
    for overflows in (True, True, False):
        scaler.scale(model(torch.ones(8, 64)).square().mean()).backward()
        if overflows:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        session = attachment.session
        pending = sum(float(flat_error(sender.error).abs().sum()) for sender in attachment.session.senders)
        skipped = session.ledger.events.skipped_steps
        told.append((pending, session.ledger.steps_seen, skipped, session.report.traffic.nbytes))
    megatron_patch.disable()
    return told


def test_steps_that_overflow_before_the_first_good_one_are_skipped_ones(pool) -> None:
    for first, second, third in pool.run(overflows_at_the_start, world_size=2):
        assert first[:3] == (0.0, 1, 1)
        assert second[:3] == (0.0, 2, 2)
        assert third[0] > 0
        assert third[1:3] == (3, 2)
        assert first[3] == second[3] == third[3]


def optimizers_of(model: Any, how: str) -> Any:
    """What steps this model: two optimizers, both in one optimizer, or torch's ZeRO around one."""

    class Container(torch.optim.Optimizer):
        """As torchtitan's: an optimizer whose step steps those of the model's parts."""

        def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
            super().__init__(
                [p for part in parts for g in part.param_groups for p in g["params"]], {"lr": 0.1}
            )
            self.parts = parts

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

    if how == "zero":
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)]
    first, second = (m for m in model.modules() if isinstance(m, nn.Linear))
    pair = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)]
    return [Container(pair)] if how == "container" else pair


def started_with(kind: str, how: str) -> tuple[list[bool], int, int]:
    """With `start_step: auto`, which of the steps were compressed; the optimizers that the manifest has."""
    model = megatron_patch.attach(wrapped(kind), megatron_patch.CompressionConfig())
    session, optimizers = attach.attachment_of(model).session, optimizers_of(model, how)
    compressed = []
    for _ in range(16):
        model(torch.ones(8, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compressed.append(session.report.compressed)
    found = compressed, len(session.ledger.onset.rates), session.ledger.steps
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("kind", "how", "optimizers"),
    [
        ("ddp", "two", 2),
        ("ddp", "container", 3),
        ("ddp", "zero", 2),
        ("fsdp2", "two", 2),
        ("fsdp2", "container", 3),
    ],
)
def test_compression_starts_beside_a_second_optimizer(pool, kind, how, optimizers) -> None:
    for compressed, known, steps in pool.run(started_with, kind, how, world_size=2):
        assert compressed == [False] * 11 + [True] * 5
        assert known == optimizers
        assert steps == 16


class Layers(nn.Module):
    """A matrix of some dtype beside one in fp32, which may be frozen; DDP alone takes unlike dtypes."""

    def __init__(self, dtype: torch.dtype, both: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Parameter(torch.randn(64, 64, dtype=dtype))
        self.second = nn.Parameter(torch.randn(64, 64)) if both else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.first @ x.to(self.first.dtype)).abs().square().mean().to(torch.float64)
        return loss if self.second is None else loss + (self.second @ x).square().mean()


def trained(kind: str, dtype: str, attached: bool, freezes: bool = False) -> tuple[list[Any], list[str]]:
    """Weights after some steps, and what was logged."""
    inner = Layers(getattr(torch, dtype), kind == "ddp")
    model = wrapped(kind, 2 if kind == "hybrid" else 1, inner, find_unused_parameters=freezes)
    if freezes:
        inner.second.requires_grad_(False)
    with logged() as lines:
        if attached:
            megatron_patch.attach(model, megatron_patch.CompressionConfig(**OPTIONS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            torch.manual_seed(7 * step + dist.get_rank())
            model(torch.randn(64, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    megatron_patch.disable()
    return [full(p).clone() for p in model.parameters()], [line for line in lines if "in full" in line]


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float64"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hybrid"])
def test_gradients_that_no_message_carries_are_sent_in_full(pool, kind: str, dtype: str) -> None:
    ranks = 4 if kind == "hybrid" else 2
    stock, ours = (pool.run(trained, kind, dtype, attached, world_size=ranks) for attached in (False, True))
    for rank, ((theirs, _), (mine, lines)) in enumerate(zip(stock, ours, strict=True)):
        assert np.array_equal(mine[0], theirs[0])
        assert [f"torch.{dtype}" in line for line in lines] == [True] * (rank == 0)
        assert kind != "ddp" or not np.array_equal(mine[1], theirs[1]), "fp32 beside it is compressed"


def named_in_full() -> list[str]:
    model = wrapped("ddp")
    with logged() as lines:
        megatron_patch.attach(model, megatron_patch.CompressionConfig(**OPTIONS))
        for dtypes in ([torch.float64], [torch.complex64, torch.float32], [torch.float64]):
            assert not attach.attachment_of(model).session.carries(dtypes)
    megatron_patch.disable()
    return [line for line in lines if "in full" in line]


def test_each_dtype_that_is_sent_in_full_is_named_once(pool) -> None:
    first, second = pool.run(named_in_full, world_size=2)
    assert [dtype in line for line, dtype in zip(first, ("float64", "complex64"), strict=True)] == [True] * 2
    assert second == []


def test_parameters_may_be_frozen_between_wrapping_and_attaching(pool) -> None:
    stock, ours = (pool.run(trained, "ddp", "float32", each, True, world_size=2)[0][0] for each in (0, 1))
    assert np.array_equal(ours[1], stock[1])
    assert not np.array_equal(ours[0], stock[0])
    np.testing.assert_allclose(ours[0], stock[0], atol=1e-3)


class Wrapper(nn.Module):
    """A trainer's wrapper around a wrapped model, as Fabric has one."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.models[0](x)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "a trainer's": Wrapper,
}


def bits_within(kind: str, wrapper: str) -> tuple[float, float]:
    inner = wrapped(kind)
    model = WRAPPERS[wrapper](inner)
    megatron_patch.attach(model, megatron_patch.CompressionConfig(**OPTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = megatron_patch.report(model).bits_per_gradient, megatron_patch.report(inner).bits_per_gradient
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_wrappers_are_looked_into(pool, kind: str, wrapper: str) -> None:
    for bits, of_inner in pool.run(bits_within, kind, wrapper, world_size=2):
        assert 4 < bits == of_inner < 6


def refused() -> list[str]:
    told = []
    for model in (
        Wrapper(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))),
        Wrapper(wrapped("ddp"), wrapped("fsdp2")),
    ):
        with pytest.raises(megatron_patch.UserError) as error:
            megatron_patch.attach(model)
        told.append(str(error.value))
    return told


def test_what_was_found_in_a_wrapper_is_said(pool) -> None:
    other, both = pool.run(refused, world_size=2)[0]
    assert "it holds torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel" in other
    assert "attach its parts by themselves" in both
