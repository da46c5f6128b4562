"""Adam in other places with compressed gradients: precision-aware, offloaded to the CPU, and both.

What the optimizer gets is compared with the float64 simulation of the exchange, as in test_muon.py; the exact
weight gather must change no bit, though these optimizers write weights where the usual one does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from simulation.adam_float64 import AdamOptions
from with_megatron.gpt_model import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from with_megatron.optimizer_stand_ins import fused_adam, offloading
from with_megatron.parallelism_agreement import Comparison, Layout, Scaling, copies
from with_megatron.weight_runs import both, differences

STEPS = 4
ADAM = AdamOptions(LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)  # not compared
LOCO = {"bits": 4, "reset_interval": 3}
GATHERED = {"overlap_grad_reduce": True, "bucket_size": 1500, "overlap_param_gather": True}
PINNED = {"pin_cpu_grads": False, "pin_cpu_params": False}  # pinned memory needs CUDA
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, **PINNED}
AWARE = {"use_precision_aware_optimizer": True}


def bf16(optimizer: dict[str, Any], **ddp: Any) -> dict[str, Any]:
    return {"dtype": "bf16", "optimizer": optimizer, "ddp": {"grad_reduce_in_fp32": False, **ddp}}


CASES = {
    "precision-aware": bf16(AWARE),
    "precision-aware-overlap": bf16(AWARE, **GATHERED),
    "offloaded": bf16(OFFLOADED),
    "offloaded-precision-aware": bf16(OFFLOADED | AWARE),
    "all-offloaded-overlap": bf16(OFFLOADED | {"optimizer_offload_fraction": 1.0}, **GATHERED),
}


SLOW = ("precision-aware", "offloaded", "all-offloaded-overlap")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
"""Others have what the slow ones have, and more."""


def stands_in(model: dict[str, Any]) -> Any:
    offloaded = model["optimizer"].get("optimizer_cpu_offload", False)
    return offloading() if offloaded else fused_adam()


def train(model: dict[str, Any], compression: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the record of compressed training, and the weights of another one."""
    from with_megatron.gpt_model import build
    from with_megatron.recording import recorded, trained

    with stands_in(model):
        report = recorded(build(**model), compression, STEPS)
        report["none"] = trained(build(**model), {"method": "none"}, STEPS)
        report["uncompressed"] = trained(build(**model), None, STEPS)
    return report


def gathered(model: dict[str, Any], *arguments: Any) -> Any:
    """In a worker: weight_runs.both."""
    with stands_in(model):
        return both(model, *arguments)


def resumed(folder: str, model: dict[str, Any], how: str) -> Any:
    """In a worker: test_sharded_state.interrupted."""
    from with_megatron.checkpoint.test_sharded_state import interrupted

    with stands_in(model):
        return interrupted(folder, model, {"method": "loco", "start_step": 0} | LOCO, how)


@pytest.fixture(autouse=True)
def _stand_in_is_accepted(name: str) -> None:
    """Before 0.19 the distributed optimizer takes Transformer Engine's own Adam only, or torch's."""
    core = pytest.importorskip("megatron.core")
    if name.startswith("precision-aware") and Version(core.__version__) < Version("0.19"):
        pytest.skip("the stand-in for FusedAdam is for megatron-core 0.19")


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_gets_the_simulated_gradients(pool, name):
    reports = pool.run(train, CASES[name], LOCO, world_size=4)
    layout = Layout(4)
    Comparison(reports, layout, Scaling(layout), ADAM, LOCO).check_gradients()
    for report in reports:
        for parameter, value in report["uncompressed"].items():
            assert np.array_equal(value, report["none"][parameter]), "method none is stock"
        assert any(not np.array_equal(report["compressed"][p], v) for p, v in report["uncompressed"].items())
        assert all(not np.array_equal(report["compressed"][p], v) for p, v in report["initial"].items())
    for (rank, parameter), *others in copies(reports, layout):
        mine = reports[rank]["compressed"][parameter]
        assert all(np.array_equal(mine, reports[r]["compressed"][its_name]) for r, its_name in others)


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_weight_gather_changes_no_bit(pool, name):
    for stock, exact in pool.run(gathered, CASES[name], {"method": "loco", **LOCO}, 8, "nothing"):
        assert differences(stock, exact) == []
        assert set(exact["stock"]) == {None}
        assert set(exact["raw"]) <= {"not_coded"}
        assert min(bits for bits in exact["bits"] if bits) < 8


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_undisturbed_one(pool, tmp_path, name):
    runs = {
        how: pool.run(resumed, str(tmp_path / how), CASES[name], how, world_size=2)
        for how in ("whole", "by reader", "forgotten")
    }
    differs = False
    for whole, by_reader, forgotten in zip(*runs.values(), strict=True):
        for parameter, value in whole.items():
            assert np.array_equal(value, by_reader[parameter]), parameter
            differs |= not np.array_equal(value, forgotten[parameter])
    assert differs, "the comparison can fail"
