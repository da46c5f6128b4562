"""Every number that Megatron-FSDP exchanges in low bits is the float64 simulation's, each microbatch.

The padding of its buckets is memory that nobody has written: here it is NaN in every exchange.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.loco_float64 import LoCoSimulation, block_labels
from with_megatron.fsdp.fsdp_runs import STEPS, saved_and_restored, train
from with_megatron.seam_runs import core_before

from megatron_patch.releases import too_old

GRADS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}
PARAMS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
UNFUSED = {"gradient_reduce_div_fusion": False}
"""Gradients that stay Megatron's own over gloo, which knows no product with a factor."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2 bits, bf16": ({"ddp": GRADS, "dtype": "bf16", "microbatches": 3}, {"bits": 2}),
    "averages": ({"ddp": GRADS | {"average_in_collective": True}, "experts": 4, "ep": 2}, {}),
    "several buckets": ({"ddp": GRADS | UNFUSED | {"bucket_size": 2000}, "dtype": "bf16"}, {}),
    "frozen": ({"ddp": GRADS, "frozen": ("linear_fc1", "word_embeddings")}, {}),
    "tensor parallel": ({"ddp": GRADS, "tp": 2, "sequence_parallel": True}, {}),
    "optim_grads_params, experts": ({"ddp": PARAMS, "experts": 4, "ep": 2}, {}),
    "two instances, optim_grads_params": (
        {"ddp": PARAMS | UNFUSED, "instances": 2, "dtype": "bf16"},
        {"bits": 2},
    ),
}


def exchanges(reports: list[dict[str, Any]]) -> dict[Any, list[list[dict[str, Any]]]]:
    """By bucket, ranks and place, for each exchange the ranks' entries, in the order of the ranks."""
    found: dict[Any, list[list[dict[str, Any]]]] = {}
    for rank, report in enumerate(reports):
        seen: dict[Any, int] = {}
        for entry in report["record"]:
            key = entry["bucket"], tuple(entry["peers"]), entry["place"]
            number = seen[key] = seen.get(key, -1) + 1
            lists = found.setdefault(key, [])
            if number == len(lists):
                lists.append([])
            assert entry["peers"][len(lists[number])] == rank
            lists[number].append(entry)
    return found


@pytest.mark.parametrize("case", CASES)
def test_exchanged_values_are_the_simulation_s(pool, case: str) -> None:
    if "tp" in CASES[case][0] and core_before("0.18"):
        pytest.skip("there Megatron-FSDP needs Transformer Engine with tensor parallelism")
    model, compression = CASES[case]
    reports = pool.run(train, model, compression, world_size=4)
    found = exchanges(reports)
    hybrid = "instances" in case
    microbatches = 1 if hybrid else model.get("microbatches", 2)
    padded = 0
    for (_, peers, place), lists in found.items():
        first = lists[0][0]
        assert len(lists) == STEPS * microbatches
        size, ranks = first["in"].numel(), len(peers)
        labels = block_labels(first["numel"], first["parameters"], 128)[place : place + size]
        padded += first["padding"]
        options = {
            "labels": labels,
            "average": first["average"],
            "gradient_dtype": first["dtype"],
            "bits": compression.get("bits", 4),
            "codec": None,
            "error_dtype": "int8",
            "reset_interval": 512,
        }
        if hybrid:
            between = AllReduceAgreement(ranks, size, **options)
        else:
            within = Agreement(LoCoSimulation(ranks, size, **options))
        for number, ours in enumerate(lists):
            gradients = np.stack([entry["in"].numpy() for entry in ours])
            sent = np.stack([entry["sent"].numpy() for entry in ours])[:, :size]
            if hybrid:
                wanted = between.exchange(gradients, sent=sent)
                assert all(np.array_equal(entry["out"].numpy(), wanted) for entry in ours)
                between.end_step()
                continue
            within.exchange(gradients, sent=sent, shards=np.stack([entry["out"].numpy() for entry in ours]))
            if (number + 1) % microbatches == 0:
                within.end_step()
    assert padded > 0, "no bucket of this case has padding"
    for report in reports:
        assert report["step"] == STEPS
        assert (report["inside"] > 0) == hybrid


@pytest.mark.skipif(
    bool(too_old("FSDP2", torch.__version__)), reason="Megatron-FSDP cannot be built twice: torch's meshes"
)
@pytest.mark.parametrize(
    "model", [{"ddp": GRADS}, {"ddp": PARAMS | UNFUSED, "instances": 2, "dtype": "bf16"}]
)
def test_error_states_are_put_back(pool, tmp_path, model: dict[str, Any]) -> None:
    """In the same layout bit for bit; half as many ranks start from zero."""
    reports = pool.run(saved_and_restored, model, str(tmp_path), True, world_size=4)
    for report in reports:
        assert any(error.any() for error in report["before"])
        assert all(map(np.array_equal, report["before"], report["after"]))
        assert report["steps"] == 2
    assert any("step 2: error states restored exactly" in line for line in reports[0]["lines"])
    if "instances" not in model:
        fewer = pool.run(saved_and_restored, model, str(tmp_path), False, world_size=2)
        assert fewer[0]["steps"] == 2
        assert any("another layout (data 4 -> 2)" in line for line in fewer[0]["lines"])
        assert not any(error.any() for error in fewer[0]["after"])
