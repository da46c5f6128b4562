"""Muon with compressed gradients, in every exchange that Megatron uses for it.

A tiny GPT (gpt_model.py) in bf16 whose matrices Muon updates, and Adam the rest. What the optimizers get is
compared with the float64 simulation of the exchange, in every step and on every rank; what they make of it
is Megatron's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded_values import flat_error
from packaging.version import Version
from simulation.adam_float64 import AdamOptions
from with_megatron.gpt_model import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from with_megatron.parallelism_agreement import Comparison, Layout, Scaling, copies
from with_megatron.weight_runs import both, differences

STEPS = 4
ADAM = AdamOptions(LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)  # not compared
LOCO = {"bits": 4}
BF16 = {"dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1500}
GATHERED = OVERLAP | {"overlap_param_gather": True}
MOE = {"experts": 4, "ep": 2}


def muon(mode: str, ddp: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return BF16 | {"muon": mode} | model | {"ddp": BF16["ddp"] | (ddp or {})}


def tp_mode(mode: str) -> dict[str, Any]:
    return {"optimizer": {"muon_tp_mode": mode}}


# name: (ranks, model, compression)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "layout-dp4": (4, muon("layout"), LOCO | {"reset_interval": 3}),
    "layout-dp4-overlap": (4, muon("layout", GATHERED), LOCO),
    "layout-dp4-fp32-gradients": (4, muon("layout", {"grad_reduce_in_fp32": True}), LOCO | {"bits": 2}),
    "layout-dp2": (2, muon("layout", {"average_in_collective": True}), LOCO | {"bits": 2}),
    "layout-tp2-dp2": (4, muon("layout", tp=2, **tp_mode("distributed")), LOCO),
    "layout-tp2-sp-dp2-tied": (
        4,
        muon("layout", tp=2, sequence_parallel=True, tied=True, **tp_mode("duplicated")),
        LOCO,
    ),
    "layout-pp2-dp2-tied": (4, muon("layout", pp=2, tied=True), LOCO),
    "layout-ep2-dp4": (4, muon("layout", **MOE), LOCO),
    "layout-tp2-sp-ep2-dp2": (
        4,
        muon("layout", **MOE, tp=2, expert_tp=1, sequence_parallel=True, **tp_mode("blockwise")),
        LOCO,
    ),
    "layout-two-hop-dp4": (4, muon("layout"), LOCO | {"ranks_per_node": 2}),
    "no-layout-dp4": (4, muon("no_layout"), LOCO | {"reset_interval": 3}),
    "no-layout-dp4-overlap": (4, muon("no_layout", GATHERED), LOCO),
    "no-layout-ep2-dp4": (4, muon("no_layout", **MOE), LOCO),
    "replicated-dp4": (4, muon("replicated"), LOCO),
    "replicated-tp2-dp2": (4, muon("replicated", tp=2, **tp_mode("duplicated")), LOCO),
}


SLOW = ("layout-tp2-dp2", "no-layout-dp4", "no-layout-ep2-dp4", "replicated-dp4")
"""Cases whose parts others have too: `make test-slow` runs them."""


@pytest.fixture(autouse=True)
def _served() -> None:
    core = pytest.importorskip("megatron.core")
    pytest.importorskip("emerging_optimizers")
    if Version(core.__version__) < Version("0.18"):
        pytest.skip("Muon is served from megatron-core 0.18 on")


def train(model: dict[str, Any], compression: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the record of compressed training, and the weights of others."""
    from with_megatron.gpt_model import build
    from with_megatron.recording import recorded, trained, weights

    gpt = build(**model)
    report = recorded(gpt, compression, STEPS)
    report["by_muon"] = muons_parameters(gpt)
    report["eight_bits"] = trained(build(**model), {"method": "naive", "bits": 8}, STEPS)
    report["none"] = trained(build(**model), {"method": "none"}, STEPS)
    report["uncompressed"] = trained(build(**model), None, STEPS)
    report["initial"] = weights(build(**model))
    return report


def muons_parameters(gpt: Any) -> int:
    """How many matrices of this rank's shard Muon updates."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_patch.megatron.seams.optimizer_step import leaves_of

    return sum(
        len(group["params"])
        for part in leaves_of(gpt.optimizer)
        if isinstance(part.optimizer, TensorParallelMuon)
        for group in part.optimizer.param_groups
    )


def distance(reports: list[dict[str, Any]], mine: str) -> float:
    """How far a training ended from the uncompressed one, in units of the way that this one went."""

    def squares(a: str, b: str) -> float:
        pairs = [(report[a][name], report[b][name]) for report in reports for name in report[a]]
        return sum(float(((x.double() - y.double()) ** 2).sum()) for x, y in pairs)

    return (squares(mine, "uncompressed") / squares("initial", "uncompressed")) ** 0.5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_muon_gets_the_simulated_gradients(pool, name):
    ranks, model, compression = CASES[name]
    reports = pool.run(train, model, compression, world_size=ranks)
    sizes = {key: model[key] for key in ("tp", "pp", "ep", "expert_tp") if key in model}
    layout = Layout(ranks, distributed=model["muon"] == "layout", **sizes)
    average = model["ddp"].get("average_in_collective", False)
    comparison = Comparison(reports, layout, Scaling(layout, average=average), ADAM, compression)
    comparison.check_gradients()

    assert sum(report["by_muon"] for report in reports) > 0
    assert distance(reports, "none") == 0, "method none is stock"
    assert 0 < distance(reports, "eight_bits") < distance(reports, "compressed")
    for (rank, parameter), *others in copies(reports, layout):
        mine = reports[rank]["compressed"][parameter]
        for other, its_name in others:
            assert np.array_equal(mine, reports[other]["compressed"][its_name]), (parameter, rank, other)


# --- the weights' gather ---------------------------------------------------------------------------------

# name: (model, whether its gather is coded)
GATHERS = {
    "layout-dp4-overlap": (muon("layout", GATHERED), True),
    "layout-ep2-dp4": (muon("layout", **MOE), True),
    "layout-tp2-sp-dp2": (muon("layout", tp=2, sequence_parallel=True, **tp_mode("duplicated")), True),
    "no-layout-dp4-overlap": (muon("no_layout", GATHERED), False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "layout-tp2-sp-dp2")) for name in GATHERS]
)
def test_the_exact_weight_gather_changes_no_bit(pool, name):
    model, coded = GATHERS[name]
    rate = {"learning_rate": 1e-3, "optimizer": {"adam_eps": 1e-8} | model.get("optimizer", {})}
    for stock, exact in pool.run(both, model | rate, {"method": "loco", **LOCO}, 8, "nothing"):
        assert differences(stock, exact) == []
        assert set(exact["stock"]) == ({None} if coded else set())
        if coded:
            assert set(exact["raw"]) <= {"not_coded"}, "the first forward pass, before any step"
            assert min(bits for bits in exact["bits"] if bits) < 8


# --- refused ---------------------------------------------------------------------------------------------


def refused(model: dict[str, Any], options: dict[str, Any], release: str | None = None) -> str:
    """In a worker: what the first step says, of another release of megatron-core if asked."""
    import megatron.core
    from with_megatron.gpt_model import build

    import megatron_patch

    before = megatron.core.__version__
    megatron.core.__version__ = release or before
    gpt = build(**model)
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**options))
    try:
        gpt.backward(0)
        gpt.update()
    except megatron_patch.UserError as error:
        return str(error)
    finally:
        megatron.core.__version__ = before
        megatron_patch.disable()
    return ""


@pytest.mark.parametrize("mode", ["layout", "replicated"])
def test_muon_of_an_older_megatron_is_refused_when_it_first_steps(pool, mode):
    for told in pool.run(refused, muon(mode), LOCO, "0.17.1", world_size=2):
        assert told.startswith("megatron.optimizer: 'muon' cannot be combined with gradient compression")
        assert "megatron-core 0.18" in told
    assert pool.run(refused, muon(mode), {"method": "none"}, "0.17.1", world_size=2) == ["", ""]


def test_onebit_adam_refuses_muon_when_it_first_steps(pool):
    onebit = {"method": "onebit_adam", "warmup_steps": 1}
    for told in pool.run(refused, muon("layout"), onebit, world_size=2):
        assert told == (
            "megatron.optimizer: 'TensorParallelMuon' cannot be combined with gradient compression: "
            "onebit_adam is Adam; use adam"
        )


# --- the default method ----------------------------------------------------------------------------------


def attached_before_muon(options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the method before the first step of a loop without Megatron's flags, and after it."""
    from with_megatron.gpt_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    gpt = build(**muon("layout"))
    config = megatron_patch.CompressionConfig(bits=4, start_step=0, error_dtype="fp32", **options)
    megatron_patch.attach(gpt.chunks, config)
    states = [session_of(chunk) for chunk in gpt.chunks]
    senders = [sender for state in states for sender in state.senders]
    before = [state.config.method for state in states]
    gpt.backward(0)
    errors = [flat_error(sender.error).clone() for sender in senders]
    gpt.update()
    pairs = zip(errors, (flat_error(sender.error) for sender in senders), strict=True)
    ratios = [float(after.norm() / error.norm()) for error, after in pairs if error.any()]
    megatron_patch.attach(gpt.chunks, config)  # the same options as before, though the method is another
    found = {
        "before": set(before),
        "after": {state.config.method for state in states},
        "beta": {sender.error.beta for sender in senders},
        "ratios": ratios,
    }
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("options", "method", "beta", "ratio"),
    [
        ({}, "error_feedback", 0.0, 5.0),  # e / (1 - beta) is pending, as before
        ({"method": "loco"}, "loco", 0.8, 1.0),
        ({"error_beta": 0.5}, "loco", 0.5, 1.0),
    ],
    ids=str,
)
def test_a_loop_without_flags_gets_muon_s_default_method_when_it_first_steps(
    pool, options, method, beta, ratio
):
    for found in pool.run(attached_before_muon, options, world_size=2):
        assert found["before"] == {"loco"}
        assert found["after"] == {method}
        assert found["beta"] == {beta}
        assert found["ratios"]
        assert found["ratios"] == pytest.approx([ratio] * len(found["ratios"]), rel=1e-5)
