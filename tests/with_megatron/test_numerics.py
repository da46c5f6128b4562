"""The numbers of docs/numerics.md, through Megatron's own DDP, buckets and distributed optimizer on 4 ranks.

Every case trains 20 steps of a tiny model with gradients that differ between ranks, blocks and steps. What
each rank sent, what it remembers and what its optimizer gets is compared with the float64 simulation, bucket
by bucket, step by step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from simulation.agreement import Agreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation, block_labels

RANKS = 4
STEPS = 20


def train(model: dict[str, Any], compression: dict[str, Any], how: str) -> dict[str, Any]:
    """In a worker: STEPS steps; per bucket its sizes, and per step and bucket what the comparison needs.

    `how` gradients get there: "backward" through autograd and Megatron's hooks, "written" into main_grad.
    """
    import torch
    from coded_values import coded_values, decoded
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    tiny = build(**model)
    megatron_patch.attach(
        [tiny.ddp], megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    )
    compressor = session_of(tiny.ddp)
    sent: dict[int, torch.Tensor] = {}

    def record(place: int, sender: Any) -> None:
        compress = sender.compress

        def compress_and_keep(gradient: torch.Tensor, payload: torch.Tensor) -> None:
            compress(gradient, payload)
            assert place not in sent, "a bucket was exchanged twice in one step"
            sent[place] = coded_values(sender.layout, decoded(sender, payload))

        sender.compress = compress_and_keep

    for place, sender in enumerate(compressor.senders):
        record(place, sender)

    steps = []
    for step in range(STEPS):
        gradients = tiny.random_gradients(step)
        sent.clear()
        if how == "backward":
            shards = tiny.exchange(gradients)
        else:
            tiny.ddp.zero_grad_buffer()
            for parameter, gradient in zip(tiny.parameters, gradients, strict=True):
                parameter.main_grad.copy_(gradient)
            tiny.ddp.finish_grad_sync()
            shards = tiny.shards()
        successful, _, _ = tiny.optimizer.step()
        assert successful
        assert len(sent) == len(tiny.buckets)
        steps.append(
            {
                "gradients": [bucket.float() for bucket in tiny.in_buckets(gradients)],
                "sent": [sent[place] for place in range(len(sent))],
                "errors": [
                    coded_values(sender.layout, sender.error.decode())
                    for sender in compressor.senders
                    if sender.error is not None
                ],
                "shards": [shard.float() for shard in shards],
                "pool": compressor.workspace.nbytes,
            }
        )
    report = {
        "steps": steps,
        "dtypes": [str(bucket.grad_data.dtype) for bucket in tiny.buckets],
        "parameters": [
            [(start, tuple(parameter.shape)) for parameter, (start, _) in bucket.param_to_index.items()]
            for bucket in tiny.buckets
        ],
        "groups": [len(group.buckets) for group in tiny.groups],
        "scaling": [bucket.gradient_scaling_factor for bucket in tiny.buckets],
        "counted": compressor.ledger.steps,
        "events": {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)},
        "weights": tiny.weights(),
    }
    megatron_patch.disable()
    return report


def agree(pool: Any, model: dict[str, Any], compression: dict[str, Any], how: str = "backward") -> list[dict]:
    """Train on the pool's workers and compare every bucket and step with the simulation."""
    reports = pool.run(train, model, compression, how, world_size=RANKS)
    first = reports[0]
    average = model.get("average", False)
    memory = compression.get("method", "loco") != "naive"
    default_beta = 0.8 if compression.get("method", "loco") == "loco" else 0.0
    reset_interval = compression.get("reset_interval", 512)
    per_token = model.get("per_token_loss", False)
    scaling = 1.0 if average or per_token else 1 / RANKS
    assert first["scaling"] == [scaling] * len(first["dtypes"])
    for bucket, torch_dtype in enumerate(first["dtypes"]):
        dtype = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}[torch_dtype]
        numel = first["steps"][0]["sent"][bucket].numel()
        block_size, labels = compression.get("block_size", 128), None
        if block_size != "shard":
            labels = block_labels(numel, first["parameters"][bucket], block_size)
        agreement = Agreement(
            LoCoSimulation(
                RANKS,
                numel,
                bits=compression.get("bits", 4),
                block_size=block_size,
                labels=labels,
                beta=compression.get("error_beta", default_beta),
                error_dtype=compression.get("error_dtype", "int8"),
                reset_interval=reset_interval,
                memory=memory,
                average=average,
                gradient_dtype=dtype,
            )
        )

        def rows(step: int, name: str, bucket: int = bucket) -> np.ndarray:
            return np.stack([report["steps"][step][name][bucket].numpy() for report in reports])

        for step in range(STEPS):
            # Megatron scales the gradients in the buffer, so in the buffer's dtype.
            gradients = round_to_gradient_dtype(rows(step, "gradients") * np.float32(scaling), dtype)
            errors = rows(step, "errors") if memory else None
            agreement.check(gradients, sent=rows(step, "sent"), errors=errors, shards=rows(step, "shards"))
            if memory:
                was_reset = bool(reset_interval) and (step + 1) % reset_interval == 0
                assert errors.any() != was_reset
    for report in reports:
        assert report["counted"] == STEPS
        resets = STEPS // reset_interval if memory and reset_interval else 0
        assert report["events"]["resets"] == resets
        assert report["events"]["skipped_steps"] == report["events"]["replays"] == 0
        # Buckets' payloads have several sizes: the pool is complete when the worst order has come.
        assert len({step["pool"] for step in report["steps"][STEPS // 2 :]}) == 1
        assert np.array_equal(report["weights"].numpy(), first["weights"].numpy())
    return reports


BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}
SEVERAL = {"overlap": True, "bucket_size": 300}
MIXED = {"dtypes": ("float32", "bfloat16"), "grad_reduce_in_fp32": False, "single_group": True}


@pytest.mark.parametrize(
    ("bits", "beta"),
    [(8, 0.0), (8, 0.8), (4, 0.0), (4, 0.5), (4, 0.8), (2, 0.0), (2, 0.8), (1, 0.5), (1, 0.8)],
)
def test_bits_and_betas_with_resets(pool, bits, beta):
    reports = agree(pool, {}, {"bits": bits, "error_beta": beta, "reset_interval": 7})
    shard = reports[0]["steps"][0]["shards"][0].numel()
    assert shard > 128, "several blocks a shard"
    assert shard % 128, "the last one short"


@pytest.mark.parametrize(
    ("model", "compression"),
    [
        (BF16, {"reset_interval": 7}),
        (BF16 | {"average": True}, {"bits": 2, "error_beta": 0.5}),
        (BF16 | SEVERAL, {"bits": 1, "reset_interval": 5}),
        ({"dtypes": ("bfloat16",)}, {"bits": 8}),
        ({"average": True}, {"reset_interval": 7}),
        (SEVERAL, {"reset_interval": 7}),
        (SEVERAL | {"average": True}, {"bits": 2, "error_beta": 0.5, "error_dtype": "bf16"}),
        ({"overlap": True}, {"block_size": 64, "error_dtype": "fp32"}),
        (MIXED, {"reset_interval": 7}),
        (MIXED | {"overlap": True}, {"bits": 4, "error_beta": 0.0}),
        ({"per_token_loss": True}, {"bits": 4}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()).replace(" ", "")[:70],
)
def test_buffers_operations_buckets_and_overlap(pool, model, compression):
    reports = agree(pool, model, compression)
    if "bucket_size" in model:
        assert len(reports[0]["groups"]) >= 3
    if "single_group" in model:
        assert reports[0]["groups"] == [2]
        assert set(reports[0]["dtypes"]) == {"torch.float32", "torch.bfloat16"}


@pytest.mark.parametrize("method", ["naive", "error_feedback"])
@pytest.mark.parametrize("block_size", [16, "shard"])
def test_other_methods_and_block_sizes(pool, method, block_size):
    reports = agree(pool, {}, {"method": method, "block_size": block_size, "reset_interval": 6})
    for step in reports[0]["steps"]:
        assert len(step["errors"]) == (len(step["sent"]) if method == "error_feedback" else 0)


def test_gradients_written_into_main_grad(pool):
    options = {"reset_interval": 7, "error_dtype": "fp32"}
    written = agree(pool, {}, options, how="written")
    by_backward = pool.run(train, {}, options, "backward", world_size=RANKS)
    for one, other in zip(written, by_backward, strict=True):
        assert np.array_equal(one["weights"].numpy(), other["weights"].numpy())


def test_overlap_changes_when_and_not_what(pool):
    runs = [
        pool.run(train, {"overlap": overlap}, {"reset_interval": 7}, "backward") for overlap in (False, True)
    ]
    for plain, overlapped in zip(*runs, strict=True):
        assert np.array_equal(plain["weights"].numpy(), overlapped["weights"].numpy())
        for before, after in zip(plain["steps"], overlapped["steps"], strict=True):
            for name in ("sent", "errors", "shards"):
                assert np.array_equal(before[name][0].numpy(), after[name][0].numpy())
