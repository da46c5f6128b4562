"""LoCo under torch's FSDP2, flat and hybrid: every exchanged number is the float64 simulation's.

What each rank exchanged of a parameter group, in every microbatch, is compared with the simulation, over
blocks that are found here from the parameters' shapes and from what torch's documentation says of sharding:
chunk j of each parameter, padded to the first one's length, goes to rank j. With method none, training is
torch's own to the last bit.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.compared import compare_all_reduces, compare_reduce_scatters
from pytorch.runs import STEPS, gradients_of, sharded, train
from simulation.loco_float64 import block_labels
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_patch
from megatron_patch.pytorch import attach, fsdp2
from megatron_patch.pytorch.fsdp2_fields import groups_of

ROOT = Path(__file__).resolve().parents[2]
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
BF16_FP32 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
LOCO = {"method": "loco", "start_step": 0}

FLAT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 bits": ({}, {}),
    "3 ranks": ({}, {"bits": 1}),
    "2 bits": ({"reshard": False}, {"bits": 2}),
    "uniform": ({}, {"codec": "uniform", "error_dtype": "bf16"}),
    "an exchange a microbatch": ({"microbatches": 3}, {"reset_interval": 4}),
    "one exchange of three microbatches": ({"microbatches": 3, "sync": "last"}, {}),
    "bf16": ({"precision": BF16, "microbatches": 2}, {}),
    "bf16, reduced in fp32": ({"precision": BF16_FP32}, {"bits": 2}),
    "frozen": ({"frozen": (0, 2)}, {}),
    "unused in every other step": ({"unused": (0, 1)}, {}),
    "unused, but exchanged": ({"unused": (0, 1), "all": True}, {}),
    "modules in one group": ({"together": True}, {}),
    "another axis": ({"axis": True}, {}),
    "sums": ({"factor": 1.0}, {}),
}
HYBRID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 bits": ({"replicas": 2}, {}),
    "2 bits": ({"replicas": 2, "reshard": False}, {"bits": 2}),
    "a group": ({"replicas": 2, "group": True}, {}),
    "an exchange a microbatch": ({"replicas": 2, "microbatches": 2}, {}),
    "all-reduce in the last microbatch": (
        {"replicas": 2, "microbatches": 3, "sync": "all-reduce last"},
        {"bits": 2},
    ),
    "no sync before the last": ({"replicas": 2, "microbatches": 2, "sync": "last"}, {}),
    "bf16": ({"replicas": 2, "precision": BF16}, {}),
    "unused in every other step": ({"replicas": 2, "unused": (0, 1)}, {}),
    "another axis": ({"replicas": 2, "axis": True}, {}),
    "replicas alone": ({"replicas": 4}, {}),
}


if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # It came with torch 2.13.
    del FLAT["unused, but exchanged"]


def chunks(parameters: list[tuple[tuple[int, ...], int]], ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """(first element, shape) of every chunk of what FSDP2 exchanges, rank by rank."""
    found, at = [], 0
    for rank in range(ranks):
        for shape, axis in parameters:
            length = math.ceil(shape[axis] / ranks)
            mine = max(min(length, shape[axis] - rank * length), 0)
            if mine:
                found.append((at, (*shape[:axis], mine, *shape[axis + 1 :])))
            at += length * math.prod(shape) // shape[axis]
    return found


@pytest.mark.parametrize("case", FLAT)
def test_a_flat_exchange_is_the_simulation_s(pool, case: str) -> None:
    how, compression = FLAT[case]
    ranks = 3 if case == "3 ranks" else 4
    reports = pool.run(train, how, LOCO | compression, world_size=ranks)

    def labels_of(entry: dict[str, Any]) -> np.ndarray:
        assert entry["average"] == (how.get("factor") is None)
        return block_labels(len(entry["in"]), chunks(entry["parameters"], ranks), 128)

    exchanges = compare_reduce_scatters(reports, compression, labels_of)
    for report in reports:
        assert report["report"]["step"] == STEPS
        assert all(map(np.array_equal, report["weights"], reports[0]["weights"]))
    if case == "unused in every other step":
        assert exchanges > 3, "sets of parameters have exchanges of their own"


def test_a_divide_factor_divides_the_sum(pool) -> None:
    sums, halves = (
        pool.run(train, {"factor": factor}, LOCO, world_size=4)[0]["norms"] for factor in (1.0, 2.0)
    )
    assert halves[0] == sums[0] / 2


@pytest.mark.parametrize("case", HYBRID)
def test_a_hybrid_exchange_is_the_simulation_s(pool, case: str) -> None:
    how, compression = HYBRID[case]
    shards = 4 // how["replicas"]
    reports = pool.run(train, how, LOCO | compression, world_size=4)
    for place in range(shards):
        mine = [report for report in reports if report["record"][0]["place"] == place]
        assert len(mine) == how["replicas"]

        def labels_of(entry: dict[str, Any], place: int = place) -> np.ndarray:
            size = len(entry["in"])
            labels = block_labels(size * shards, chunks(entry["parameters"], shards), 128)
            return labels[place * size : (place + 1) * size]

        compare_all_reduces(mine, compression, labels_of)
    for report in reports:
        assert all(map(np.array_equal, report["weights"], reports[0]["weights"]))
        assert (report["inside"] > 0) == (shards > 1)


NONE = {
    "flat": ("4 bits", "2 bits", "an exchange a microbatch", "bf16", "frozen", "unused in every other step"),
    "hybrid": ("4 bits", "an exchange a microbatch", "no sync before the last", "bf16", "replicas alone"),
}
SETUPS = [FLAT[case][0] for case in NONE["flat"]] + [HYBRID[case][0] for case in NONE["hybrid"]]


def test_what_waits_for_its_all_reduce_is_added(pool) -> None:
    how = {"replicas": 2, "microbatches": 2}
    waits = pool.run(train, how | {"sync": "all-reduce last"}, {"method": "none"}, world_size=4)[0]
    stock = pool.run(train, how | {"sync": "last"}, None, world_size=4)[0]
    np.testing.assert_allclose(waits["norms"], stock["norms"], rtol=1e-5)


def test_replicas_are_compared_without_a_copy_of_the_weights() -> None:
    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            result = function(*arguments, **(options or {}))
            self.most = max(self.most, result.numel() if result.dtype == torch.float64 else 0)
            return result

    weights = torch.ones(1000, dtype=torch.bfloat16)
    with Sizes() as sizes:
        assert fsdp2._two_sums(weights).tolist() == [1000, 1000**0.5]
    assert sizes.most == 2


@pytest.mark.parametrize("how", SETUPS, ids=str)
def test_method_none_is_torch_s_own(pool, how: dict[str, Any]) -> None:
    stock = pool.run(train, how, None, world_size=4)
    none = pool.run(train, how, {"method": "none"}, world_size=4)
    for mine, theirs in zip(none, stock, strict=True):
        assert mine["norms"] == theirs["norms"]
        assert all(map(np.array_equal, mine["weights"], theirs["weights"]))
        reduced = how.get("precision", {}).get("reduce_dtype", "float32")
        assert mine["report"]["bits"] == {"float32": 32, "bfloat16": 16}[reduced]


def refusals() -> list[str]:
    told = []

    def refused(model: Any, group: Any = None, **options: Any) -> None:
        try:
            megatron_patch.attach(model, megatron_patch.CompressionConfig(**options), group)
        except megatron_patch.UserError as error:
            told.append(str(error))
        else:
            told.append("")

    refused(nn.Linear(4, 4))
    refused("model")
    model, _ = sharded({})
    refused(model, method="onebit_adam")
    refused(model, weight_gather="exact")
    model.blocks[0].set_all_reduce_hook(lambda output: None)
    refused(model)
    hybrid, _ = sharded({"replicas": 2})
    refused(hybrid, torch.distributed.group.WORLD)
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(mixed[0], mesh=mesh["a"])
    fully_shard(mixed[1], mesh=mesh["b"])
    refused(mixed)
    whole, _ = sharded({})
    megatron_patch.attach(whole)
    refused(whole, bits=2)
    refused(whole, torch.distributed.group.WORLD)
    megatron_patch.disable()
    return told


def test_what_cannot_be_served_is_refused_in_one_line(pool) -> None:
    told = pool.run(refusals, world_size=4)[0]
    words = [
        "Linear is not wrapped in Megatron's DistributedDataParallel, nor in torch's, and fully_shard",
        "builtins.str is not wrapped",
        "onebit_adam is for Megatron's optimizers",
        "weight_gather: exact is for Megatron's distributed optimizer",
        "has an all-reduce hook already",
        "the model's mesh has replicas already",
        "sharded over different meshes",
        "attached to this model already, with other options",
        "or another group",
    ]
    for line, wanted in zip(told, words, strict=True):
        assert wanted in line
        assert "\n" not in line


def refused_by_backward(model: Any) -> str:
    try:
        model(gradients_of(model, torch.distributed.get_rank(), 0, torch.float32)).backward()
    except megatron_patch.UserError as error:
        return str(error)
    finally:
        megatron_patch.disable()
    return ""


def unlike_replicas() -> str:
    model, _ = sharded({"replicas": 2})
    with torch.no_grad():
        if torch.distributed.get_rank() == 3:
            next(model.parameters()).to_local()[0, 0] += 1
    megatron_patch.attach(model)
    return refused_by_backward(model)


def test_replicas_that_differ_at_the_start_are_refused(pool) -> None:
    told = pool.run(unlike_replicas, world_size=4)
    assert all("replicas begin with unlike weights" in line for line in told), "ranks 0 and 2 are alike"


def default_methods() -> list[str]:
    found = []
    for how in ({}, {"replicas": 2}):
        model, _ = sharded(how)
        megatron_patch.attach(model)
        found.append(attach.attachment_of(model).config.method)
        megatron_patch.disable()
        for part in groups_of(model):
            assert part.is_taken is None, "disable gives FSDP2 its own exchange back"
    return found


def test_the_default_keeps_errors_where_they_are_a_shard_s(pool) -> None:
    assert pool.run(default_methods, world_size=4)[0] == ["naive", "loco"]


def in_backward() -> str:
    model, _ = sharded({})
    megatron_patch.attach(model)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return refused_by_backward(model)


def test_an_optimizer_within_the_backward_pass_is_refused(pool) -> None:
    assert "SGD steps within the backward pass" in pool.run(in_backward, world_size=2)[0]


WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
sys.modules["megatron.core"] = None
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import megatron_patch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(8, 8)
fully_shard(model)
megatron_patch.attach(model, megatron_patch.CompressionConfig(start_step=0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print(megatron_patch.report().step)
megatron_patch.disable()
"""


def test_it_works_where_megatron_core_is_not_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"  # Some releases of gloo print that ranks are connected.
