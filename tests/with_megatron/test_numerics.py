"""What Megatron's seam hands to the senders of each kind of buffer and exchange: buckets, scales, steps.

A tiny model (tiny_model.py) is trained with gradients that differ between ranks, blocks and steps. What each
rank sent, what it remembers and how its weights move is compared with float64, bucket by bucket, step by
step. All codes and settings are compared in tests/collectives/test_sender.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from simulation.adam_float64 import AdamOptions
from with_megatron.parallelism_agreement import Comparison, Scaling, layout_of
from with_megatron.recording import recorded
from with_megatron.seam_runs import MIXED, SEVERAL
from with_megatron.tiny_model import TinyTraining, build

RANKS = 4
STEPS = 6
ADAM = AdamOptions(1e-2, (0.9, 0.95), 1e-2)
BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}
RESETS = {"reset_interval": 4}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one bucket": ({}, RESETS | {"error_dtype": "fp32"}),
    "written": ({}, RESETS),
    "bf16 averaged": (BF16 | {"average": True}, {"bits": 2, "error_beta": 0.5}),
    "bf16 reduced in fp32, several": (SEVERAL | {"dtypes": ("bfloat16",)}, {"bits": 8}),
    "several averaged": (SEVERAL | {"average": True}, RESETS | {"error_dtype": "bf16"}),
    "bf16, several": (BF16 | SEVERAL, RESETS | {"bits": 1}),
    "mixed": (MIXED, RESETS),
    "mixed with overlap": (MIXED | {"overlap": True}, {"error_beta": 0.0, "block_size": 64}),
    "replicated": ({"ddp": {"use_distributed_optimizer": False}} | SEVERAL, RESETS),
    "two instances": ({"instances": 2, "overlap": True}, RESETS),
    "experts": ({"experts": (1, 4), "expert_parallel": 2}, RESETS),
    "two hops": (SEVERAL, RESETS | {"ranks_per_node": 2}),
}


def train(case: str) -> dict[str, Any]:
    """In a worker: the record; gradients get there by Megatron's hooks, or are "written" into main_grad."""
    model, compression = CASES[case]
    adam = {"lr": ADAM.lr, "adam_beta1": ADAM.betas[0], "adam_beta2": ADAM.betas[1], "adam_eps": ADAM.eps}
    tiny = build(**model, optimizer=adam)
    return recorded(TinyTraining(tiny, written=case == "written"), compression, STEPS)


@pytest.mark.parametrize("case", CASES)
def test_buckets_scales_and_steps_are_the_simulated_ones(pool, case: str) -> None:
    model, compression = CASES[case]
    reports = pool.run(train, case, world_size=RANKS)
    layout = layout_of(RANKS, model)
    options = {"beta" if name == "error_beta" else name: value for name, value in compression.items()}
    scaling = Scaling(layout, model.get("average", False))
    Comparison(reports, layout, scaling, ADAM, {"bits": 4} | options).check()
    buckets = reports[0]["buckets"]
    assert len(buckets) >= (3 if "bucket_size" in model else 1)
    if "single_group" in model:
        assert {bucket["dtype"] for bucket in buckets} == {"torch.float32", "torch.bfloat16"}
    errors = [error for error in reports[0]["steps"][3]["errors"] for error in error.values()]
    assert any(error.any() for error in errors) != ("reset_interval" in compression)
