"""LoCo under torch's DistributedDataParallel: what is exchanged is the simulation's, method none is stock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.compared import compare_all_reduces
from pytorch.runs import STEPS, train
from simulation.loco_float64 import block_labels
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import megatron_patch

LOCO = {"method": "loco", "start_step": 0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 bits": ({}, {}),
    "3 ranks, one bucket": ({"bucket_mb": 25}, {"bits": 1}),
    "2 bits, views of buckets": ({"options": {"gradient_as_bucket_view": True}}, {"bits": 2}),
    "an exchange a microbatch": ({"microbatches": 2}, {"reset_interval": 3}),
    "no_sync": ({"microbatches": 3, "sync": "last"}, {}),
    "bf16": ({"dtype": "bfloat16"}, {}),
    "frozen": ({"frozen": (0, 2)}, {}),
    "unused on some ranks": ({"unused": (0, 1), "options": {"find_unused_parameters": True}}, {}),
    # DDP assigns parameters to buckets after the second pass here: errors start from zero.
    "static graph": ({"options": {"static_graph": True}}, {}),
}


def labels_of(entry: dict[str, Any], ranks: int) -> np.ndarray:
    sizes = [math.prod(shape) for shape in entry["shapes"]]
    numel = len(entry["in"])
    assert sum(sizes) == numel
    starts = np.cumsum([0, *sizes]).tolist()
    labels = block_labels(numel, list(zip(starts, entry["shapes"], strict=False)), 128)
    return np.concatenate([labels, np.full(-numel % ranks, -1)])


@pytest.mark.parametrize("case", CASES)
def test_an_exchange_is_the_simulation_s(pool, case: str) -> None:
    how, compression = CASES[case]
    ranks = 3 if "3 ranks" in case else 4
    reports = pool.run(train, {"kind": "ddp"} | how, LOCO | compression, world_size=ranks)
    ends = reports[0]["steps"]
    assert ends[0] <= ends[1] // 2, "DDP's first backward pass is exchanged in full"
    assert ends[-1] >= STEPS - 1
    compare_all_reduces(reports, compression, lambda entry: labels_of(entry, ranks))
    for report in reports:
        assert report["report"]["step"] == STEPS
        assert all(map(np.array_equal, report["weights"], reports[0]["weights"]))


@pytest.mark.parametrize("case", CASES)
def test_method_none_is_ddp_s_own(pool, case: str) -> None:
    how, ranks = {"kind": "ddp"} | CASES[case][0], 3 if "3 ranks" in case else 4
    stock = pool.run(train, how, None, world_size=ranks)
    none = pool.run(train, how, {"method": "none"}, world_size=ranks)
    for mine, theirs in zip(none, stock, strict=True):
        assert mine["norms"] == theirs["norms"]
        assert all(map(np.array_equal, mine["weights"], theirs["weights"]))
        assert mine["report"]["bits"] == (16 if how.get("dtype") else 32)


def refusals() -> list[str]:
    told = []
    for how, group, options in (
        ("hooked", None, {}),
        ("optimized", torch.distributed.group.WORLD, {}),
        ("optimized", None, {"method": "onebit_adam"}),
        ("python_reducer", None, {}),
    ):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer" if "_" in how else True):
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
        if how == "hooked":
            model.register_comm_hook(None, bf16_compress_hook)
        try:
            megatron_patch.attach(model, megatron_patch.CompressionConfig(**options), group)
        except megatron_patch.UserError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_served_is_refused_in_one_line(pool) -> None:
    told = pool.run(refusals, world_size=2)[0]
    words = ("hook already", "leave out replicate_group", "use loco", "has no buckets")
    for line, wanted in zip(told, words, strict=True):
        assert wanted in line
        assert "\n" not in line


def again() -> list[float]:
    """Attached, detached and attached again: DDP has one hook all the time."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits = []
    for method in ("loco", "none", "naive"):
        megatron_patch.attach(model, megatron_patch.CompressionConfig(method=method, start_step=0))
        for step in range(2):
            model(torch.full((2, 64), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bits.append(megatron_patch.report(model).bits_per_gradient)
        megatron_patch.disable()
    return bits


def test_a_model_can_be_attached_again(pool) -> None:
    loco, none, naive = pool.run(again, world_size=2)[0]
    assert loco == naive < 6
    assert none == 32
