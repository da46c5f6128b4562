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
from pytorch.fsdp2_runs import STEPS, gradients_of, sharded, train
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.loco_float64 import LoCoSimulation, block_labels
from torch.distributed.fsdp import FSDPModule

ROOT = Path(__file__).resolve().parents[2]
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
BF16_FP32 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
LOCO = {"method": "loco", "start_step": 0}

FLAT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 bits": ({}, {}),
    "3 ranks": ({}, {"bits": 1}),
    "2 bits": ({"reshard": False}, {"bits": 2}),
    "uniform": ({"reshard": 2}, {"codec": "uniform", "error_dtype": "bf16"}),
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
    "a group, all-reduce in the last microbatch": (
        {"replicas": 2, "group": True, "microbatches": 2, "sync": "all-reduce last"},
        {},
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


def options(compression: dict[str, Any]) -> dict[str, Any]:
    return {
        "bits": compression.get("bits", 4),
        "codec": compression.get("codec"),
        "error_dtype": compression.get("error_dtype", "int8"),
        "reset_interval": compression.get("reset_interval", 512),
    }


def names(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}[dtype]


@pytest.mark.parametrize("case", FLAT)
def test_a_flat_exchange_is_the_simulation_s(pool, case: str) -> None:
    how, compression = FLAT[case]
    ranks = 3 if case == "3 ranks" else 4
    how = how | ({} if case != "uniform" else {"reshard": True})
    reports = pool.run(train, how, LOCO | compression, world_size=ranks)
    agreements: dict[str, Agreement] = {}
    entries = list(zip(*(report["record"] for report in reports), strict=True))
    ends = reports[0]["steps"]
    assert len(entries) == ends[-1] > 0
    for number, ours in enumerate(entries):
        first = ours[0]
        key = f"{first['group']} {first['parameters']}"
        numel = first["in"].numel()
        if key not in agreements:
            labels = block_labels(numel, chunks(first["parameters"], ranks), 128)
            agreements[key] = Agreement(
                LoCoSimulation(
                    ranks,
                    numel,
                    labels=labels,
                    average=first["average"],
                    gradient_dtype=names(first["dtype"]),
                    **options(compression),
                )
            )
        assert first["average"] == (how.get("factor") is None)
        agreements[key].exchange(
            np.stack([entry["in"].numpy() for entry in ours]),
            sent=np.stack([entry["sent"].numpy() for entry in ours]),
            shards=np.stack([entry["out"].numpy() for entry in ours]),
        )
        if number + 1 in ends:
            for agreement in agreements.values():
                agreement.end_step()
    for report in reports:
        assert report["report"]["step"] == STEPS
        assert all(map(np.array_equal, report["weights"], reports[0]["weights"]))
    if case == "unused in every other step":
        assert len(agreements) > 3, "sets of parameters have exchanges of their own"


@pytest.mark.parametrize("case", HYBRID)
def test_a_hybrid_exchange_is_the_simulation_s(pool, case: str) -> None:
    how, compression = HYBRID[case]
    replicas = how["replicas"]
    shards = 4 // replicas
    reports = pool.run(train, how, LOCO | compression, world_size=4)
    ends = reports[0]["steps"]
    assert ends[-1] > 0
    for place in range(shards):
        mine = [report for report in reports if report["record"][0]["place"] == place]
        assert len(mine) == replicas
        agreements: dict[str, AllReduceAgreement] = {}
        for number, ours in enumerate(zip(*(report["record"] for report in mine), strict=True)):
            first = ours[0]
            key = f"{first['group']} {first['parameters']}"
            size = first["in"].numel()
            if key not in agreements:
                labels = block_labels(size * shards, chunks(first["parameters"], shards), 128)
                agreements[key] = AllReduceAgreement(
                    replicas,
                    size,
                    labels=labels[place * size : (place + 1) * size],
                    average=True,
                    gradient_dtype=names(first["dtype"]),
                    **options(compression),
                )
            found = agreements[key].exchange(
                np.stack([entry["in"].numpy() for entry in ours]),
                sent=np.stack([entry["sent"].numpy() for entry in ours])[:, :size],
            )
            assert all(np.array_equal(entry["out"].numpy(), found) for entry in ours)
            if number + 1 in ends:
                for agreement in agreements.values():
                    agreement.end_step()
    for report in reports:
        assert all(map(np.array_equal, report["weights"], reports[0]["weights"]))
        assert (report["inside"] > 0) == (shards > 1)


SETUPS = {  # gloo refuses what torch does for a divide factor
    f"flat, {case}": how for case, (how, _) in FLAT.items() if not how.get("factor")
} | {f"hybrid, {case}": how for case, (how, _) in HYBRID.items() if not how.get("group")}


@pytest.mark.parametrize("case", SETUPS)
def test_method_none_is_torch_s_own(pool, case: str) -> None:
    if "all-reduce last" in str(SETUPS[case]):
        pytest.skip("FSDP2 keeps no gradient before the all-reduce; attached, it has one of zeros")
    stock = pool.run(train, SETUPS[case], None, world_size=4)
    none = pool.run(train, SETUPS[case], {"method": "none"}, world_size=4)
    for mine, theirs in zip(none, stock, strict=True):
        assert mine["norms"] == theirs["norms"]
        assert all(map(np.array_equal, mine["weights"], theirs["weights"]))
        reduced = SETUPS[case].get("precision", {}).get("reduce_dtype", "float32")
        assert mine["report"]["bits"] == {"float32": 32, "bfloat16": 16}[reduced]


def refusals() -> list[str]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import megatron_patch

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
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(mixed[0], mesh=mesh["a"])
    fully_shard(mixed[1], mesh=mesh["b"])
    refused(mixed)
    whole, _ = sharded({})
    megatron_patch.attach(whole)
    refused(whole, bits=2)
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
    ]
    for line, wanted in zip(told, words, strict=True):
        assert wanted in line
        assert "\n" not in line


def unlike_replicas() -> str:
    import torch

    import megatron_patch

    model, _ = sharded({"replicas": 2})
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        if rank == 3:
            next(model.parameters()).to_local()[0, 0] += 1
    megatron_patch.attach(model)
    try:
        model(gradients_of(model, rank, 0, torch.float32)).backward()
    except megatron_patch.UserError as error:
        return str(error)
    finally:
        megatron_patch.disable()
    return ""


def test_replicas_that_differ_at_the_start_are_refused(pool) -> None:
    told = pool.run(unlike_replicas, world_size=4)
    assert all("replicas begin with unlike weights" in line for line in told), "ranks 0 and 2 are alike"


def default_methods() -> list[str]:
    import megatron_patch
    from megatron_patch.pytorch import attach
    from megatron_patch.pytorch.fsdp2_fields import groups_of

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
    import torch

    import megatron_patch

    model, _ = sharded({})
    megatron_patch.attach(model)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    try:
        model(gradients_of(model, torch.distributed.get_rank(), 0, torch.float32)).backward()
    except megatron_patch.UserError as error:
        return str(error)
    finally:
        megatron_patch.disable()
    return ""


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
