"""1-bit Adam through Megatron's DDP and optimizers, against a float64 simulation of its formulas."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from simulation.loco_float64 import block_labels
from simulation.onebit_adam_float64 import OneBitAdamSimulation, shard_blocks
from with_megatron.seam_runs import REPLICATED, attach, refusal
from with_megatron.tiny_model import SHAPES, build

RANKS = 4
STEPS = 32
WARMUP = 10
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95}


def learning_rate(step: int) -> float:
    """Rises over 5 steps, and falls from then on."""
    return OPTIMIZER["lr"] * min((step + 1) / 5, 1 - step / 100)


def train(model: dict[str, Any], compression: dict[str, Any]) -> dict[str, Any]:
    """In a worker: STEPS steps of a tiny model; what the simulation needs, in the order of the buckets."""
    model = {**model, "optimizer": OPTIMIZER | model.get("optimizer", {})}
    tiny = build(**model)
    compressor = attach([tiny.ddp], {"method": "onebit_adam", **compression})

    def in_order(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([flat.double() for flat in tiny.in_buckets(values)])

    report: dict[str, Any] = {
        "initial": in_order([p.detach() for p in tiny.parameters]),
        "decays": in_order([torch.full_like(p, float(p.dim() > 1)) for p in tiny.parameters]),
        "padding": 1 - in_order([torch.ones_like(p) for p in tiny.parameters]),
        "lengths": [bucket.grad_data.numel() for bucket in tiny.buckets],
        "parameters": [
            [(start, tuple(parameter.shape)) for parameter, (start, _) in bucket.param_to_index.items()]
            for bucket in tiny.buckets
        ],
        "steps": [],
    }
    for step in range(STEPS):
        gradients = tiny.random_gradients(step)
        for group in tiny.optimizer.param_groups:  # as Megatron's scheduler does
            group["lr"] = learning_rate(step)
            group["weight_decay"] = OPTIMIZER["weight_decay"] * group["wd_mult"]
        tiny.ddp.zero_grad_buffer()
        tiny.optimizer.zero_grad()
        tiny.backward(gradients)
        tiny.ddp.finish_grad_sync()
        active = compressor.active
        successful, norm, _ = tiny.optimizer.step()
        assert successful
        report["steps"].append(
            {
                "gradients": in_order(gradients),
                "weights": in_order([p.detach() for p in tiny.parameters]),
                "norm": norm,
                "active": active,
            }
        )
    report["events"] = {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)}
    report["phase"] = compressor.ledger.phase
    return report


@pytest.mark.parametrize(
    ("model", "compression"),
    [
        ({"overlap": True, "bucket_size": 400}, {}),
        (REPLICATED | {"average": True, "bucket_size": 400}, {"block_size": 64}),
        ({}, {"error_compensation": False}),
        (REPLICATED | {"shapes": (*SHAPES, (0, 7))}, {"ranks_per_node": 2}),
        ({"overlap": True}, {"ranks_per_node": 2}),
    ],
)
def test_formulas_over_the_switch(pool: Any, model: dict[str, Any], compression: dict[str, Any]) -> None:
    compression = {"warmup_steps": WARMUP, "error_dtype": "fp32", **compression}
    reports = pool.run(train, model, compression, world_size=RANKS)
    first = reports[0]
    block = compression.get("block_size", 128)
    labels = [
        block_labels(numel, parameters, block, exact=False)
        for numel, parameters in zip(first["lengths"], first["parameters"], strict=True)
    ]
    simulation = OneBitAdamSimulation(
        first["initial"].numpy(),
        first["lengths"],
        workers=RANKS,
        warmup_steps=WARMUP,
        lr=OPTIMIZER["lr"],
        betas=(0.9, OPTIMIZER["adam_beta2"]),
        eps=1e-8,
        decay=OPTIMIZER["weight_decay"] * first["decays"].numpy(),
        clip=OPTIMIZER["clip_grad"],
        blocks=[shard_blocks(of_bucket, RANKS, block) for of_bucket in labels],
        compensate=compression.get("error_compensation", True),
        ranks_per_node=compression.get("ranks_per_node", 1),
        padding=first["padding"].numpy().astype(bool),
    )
    forked = np.zeros(len(simulation.x), dtype=bool)
    for step in range(STEPS):
        simulation.lr = learning_rate(step)
        gradients = np.stack([report["steps"][step]["gradients"].numpy() for report in reports])
        simulation.step(gradients, first["steps"][step]["norm"])
        norms = 1 if step < WARMUP else np.linalg.norm(gradients.mean(axis=0)) / simulation.norm
        for report in reports:
            found = report["steps"][step]
            assert found["active"] == (step >= WARMUP)
            assert found["norm"] == pytest.approx(simulation.norm, rel=1e-5), step
            assert norms == pytest.approx(1, abs=0.12)  # 1,096 elements in 1,024 columns: few meet
            apart = np.abs(found["weights"].numpy() - simulation.x) / np.sqrt(np.mean(simulation.x**2))
            forked |= simulation.undecided & (apart > 5e-6)
            assert forked.mean() < 0.3
            off = np.sqrt(np.mean(apart[~forked] ** 2))
            assert off < 1e-5, f"step {step}: {off}"
    assert first["phase"].variance_steps == WARMUP


def freed(active: bool) -> list[bool]:
    """Whether a model and its optimizer are freed, in the warm-up or after it, without `disable`."""
    from megatron_patch.megatron.attach import attached_chunks, onebit_of

    tiny = build(optimizer=OPTIMIZER)
    attach([tiny.ddp], {"method": "onebit_adam", "warmup_steps": 1 if active else 9})
    for step in range(3):
        tiny.ddp.zero_grad_buffer()
        tiny.step(tiny.random_gradients(step))
    found = [onebit_of(tiny.optimizer) is not None]
    references = [weakref.ref(tiny.ddp), weakref.ref(tiny.optimizer), weakref.ref(tiny.parameters[0])]
    del tiny
    for _ in range(3):  # cycles that go through autograd's nodes are found one after the other
        gc.collect()
    found += [reference() is None for reference in references]
    found.append(attached_chunks() == [])
    return found


@pytest.mark.parametrize("active", [False, True])
def test_a_model_that_is_thrown_away_is_freed(pool: Any, active: bool) -> None:
    assert pool.run(freed, active, world_size=2) == [[True] * 5] * 2


def stepped_one_by_one() -> str:
    tiny = build(experts=(0, 2), expert_parallel=2, optimizer=OPTIMIZER)
    attach([tiny.ddp], {"method": "onebit_adam", "warmup_steps": 2})

    def step() -> None:
        tiny.exchange(tiny.random_gradients(0))
        for part in tiny.optimizer.chained_optimizers:
            part.step()

    return refusal(step)


def test_a_loop_that_steps_chained_optimizers_one_by_one_is_told_what_to_call(pool: Any) -> None:
    for line in pool.run(stepped_one_by_one, world_size=4):
        assert line.startswith("onebit_adam exchanges the momentum of all of a model's optimizers at once")
        assert "get_megatron_optimizer" in line
