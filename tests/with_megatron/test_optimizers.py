"""Muon, and Adam in other places, with compressed gradients: precision-aware, offloaded to the CPU, and both.

What the optimizer gets of a tiny GPT's gradients (gpt_model.py) is compared with the float64 simulation of
the exchange, in every step and on every rank; what it makes of them is Megatron's. The exact weight gather
must change no bit, though these optimizers write weights where the usual one does not.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any
from unittest import mock

import numpy as np
import pytest
from coded_values import flat_error
from with_megatron.checkpoint.whole_checkpoints import interrupted
from with_megatron.gpt_model import BF16, GATHERED, MOE, build
from with_megatron.optimizer_stand_ins import fused_adam, offloading
from with_megatron.parallelism_agreement import ADAM, Comparison, Scaling, apart, distance, layout_of
from with_megatron.recording import recorded, trained
from with_megatron.seam_runs import attach, core_before, leaves_of, refusal, session_of
from with_megatron.weight_runs import both, differences

import megatron_patch

STEPS = 4
LOCO = {"bits": 4}
RESETS = LOCO | {"reset_interval": 3}
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    **dict.fromkeys(("pin_cpu_grads", "pin_cpu_params"), False),  # pinned memory needs CUDA
}
AWARE = {"use_precision_aware_optimizer": True}


def muon(mode: str, ddp: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return BF16 | {"muon": mode} | model | {"ddp": BF16["ddp"] | (ddp or {})}


def adam(optimizer: dict[str, Any], **ddp: Any) -> dict[str, Any]:
    return BF16 | {"optimizer": optimizer, "ddp": BF16["ddp"] | ddp}


def tp_mode(mode: str) -> dict[str, Any]:
    return {"optimizer": {"muon_tp_mode": mode}}


needs_muon = pytest.mark.skipif(
    core_before("0.18") or importlib.util.find_spec("emerging_optimizers") is None,
    reason="Muon is served from megatron-core 0.18 on",
)
needs_fused_adam = pytest.mark.skipif(
    core_before("0.19"), reason="before 0.19 the distributed optimizer takes no stand-in for FusedAdam"
)
MARKS = {"muon": needs_muon, "aware": needs_fused_adam, "offloaded": ()}
# name: (ranks, model, compression)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "muon-layout-dp4-overlap": (4, muon("layout", GATHERED), LOCO),
    "muon-layout-dp2": (2, muon("layout", {"average_in_collective": True}), {"bits": 2}),
    "muon-layout-tp2-sp-dp2-tied": (
        4,
        muon("layout", tp=2, sequence_parallel=True, tied=True, **tp_mode("duplicated")),
        LOCO,
    ),
    "muon-layout-pp2-dp2-tied": (4, muon("layout", pp=2, tied=True), LOCO),
    "muon-layout-tp2-sp-ep2-dp2": (
        4,
        muon("layout", **MOE, tp=2, expert_tp=1, sequence_parallel=True, **tp_mode("blockwise")),
        LOCO,
    ),
    "muon-no-layout-dp4-overlap": (4, muon("no_layout", GATHERED), RESETS),
    "muon-replicated-tp2-dp2": (4, muon("replicated", tp=2, **tp_mode("duplicated")), LOCO),
    "aware-overlap": (4, adam(AWARE, **GATHERED), RESETS),
    "offloaded-aware": (4, adam(OFFLOADED | AWARE), RESETS),
}
COMPARED = ("muon-layout-tp2-sp-dp2-tied", "aware-overlap", "offloaded-aware")
"""They are trained uncompressed as well."""


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=MARKS[name.partition("-")[0]]) for name in names]


def stands_in(model: dict[str, Any]) -> Any:
    """What the optimizer of a model needs a GPU for."""
    optimizer = model.get("optimizer", {})
    if "optimizer_cpu_offload" in optimizer:
        return offloading()
    return fused_adam() if "use_precision_aware_optimizer" in optimizer else contextlib.nullcontext()


def train(name: str) -> dict[str, Any]:
    """In a worker: the record of compressed training, and in some cases the weights of others."""
    _, model, compression = CASES[name]
    with stands_in(model):
        gpt = build(**model)
        report = recorded(gpt, compression, STEPS)
        report["by_muon"] = muons_parameters(gpt) if "muon" in model else 0
        if name in COMPARED:
            report["eight_bits"] = trained(build(**model), {"method": "naive", "bits": 8}, STEPS)
            report["none"] = trained(build(**model), {"method": "none"}, STEPS)
            report["uncompressed"] = trained(build(**model), None, STEPS)
    return report


def muons_parameters(gpt: Any) -> int:
    """How many matrices of this rank's shard Muon updates."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    return sum(
        len(group["params"])
        for part in leaves_of(gpt.optimizer)
        if isinstance(part.optimizer, TensorParallelMuon)
        for group in part.optimizer.param_groups
    )


@pytest.mark.parametrize("name", marked(CASES))
def test_the_optimizer_gets_the_simulated_gradients(pool, name):
    ranks, model, compression = CASES[name]
    reports = pool.run(train, name, world_size=ranks)
    layout = layout_of(ranks, model)
    average = model["ddp"].get("average_in_collective", False)
    Comparison(reports, layout, Scaling(layout, average=average), ADAM, compression).check_gradients()
    assert (sum(report["by_muon"] for report in reports) > 0) == ("muon" in model)
    assert not apart(reports, layout, lambda report: report["compressed"])
    for report in reports:
        assert all(not np.array_equal(report["compressed"][p], v) for p, v in report["initial"].items())
    if name in COMPARED:
        assert distance(reports, "none") == 0, "method none is stock"
        assert 0 < distance(reports, "eight_bits") < distance(reports, "compressed")


def gathered(model: dict[str, Any], compression: dict[str, Any]) -> Any:
    """In a worker: weight_runs.both."""
    rate = {"learning_rate": 1e-3, "optimizer": {"adam_eps": 1e-8} | model.get("optimizer", {})}
    with stands_in(model):
        return both(model | (rate if "muon" in model else {}), {"method": "loco", **compression}, 8)


GATHERS = {
    "muon-layout-dp4-overlap": muon("layout", GATHERED),
    "muon-layout-ep2-dp4": muon("layout", **MOE),
    "muon-no-layout-dp4-overlap": muon("no_layout", GATHERED),
    "aware-overlap": CASES["aware-overlap"][1],
    "offloaded-aware": CASES["offloaded-aware"][1],
}


@pytest.mark.parametrize("name", marked(GATHERS))
def test_the_exact_weight_gather_changes_no_bit(pool, name):
    """Without Muon's layout it is Megatron's own."""
    coded = "no-layout" not in name
    for stock, exact in pool.run(gathered, GATHERS[name], RESETS):
        assert differences(stock, exact) == []
        assert set(exact["stock"]) == ({None} if coded else set())
        if coded:
            assert set(exact["raw"]) <= {"not_coded"}, "the first forward pass, before any step"
            assert min(bits for bits in exact["bits"] if bits) < 8


def resumed(folder: str, name: str, how: str) -> Any:
    """In a worker: whole_checkpoints.interrupted."""
    _, model, compression = CASES[name]
    with stands_in(model):
        return interrupted(folder, model, {"start_step": 0} | compression, how)


@pytest.mark.parametrize("name", marked(("aware-overlap", "offloaded-aware", "muon-layout-dp2")))
def test_a_resumed_run_is_the_undisturbed_one(pool, tmp_path, name):
    """With Muon the method is another default, which is known before the first step after a resume."""
    runs = {
        how: pool.run(resumed, str(tmp_path / how), name, how, world_size=2)
        for how in ("whole", "by reader", "forgotten")
    }
    differs = False
    for whole, by_reader, forgotten in zip(*runs.values(), strict=True):
        for parameter, value in whole.items():
            assert np.array_equal(value, by_reader[parameter]), parameter
            differs |= not np.array_equal(value, forgotten[parameter])
    assert differs, "the comparison can fail"


def refused(model: dict[str, Any], options: dict[str, Any], release: str | None = None) -> str:
    """In a worker: what the first step says, of another release of megatron-core if asked."""
    import megatron.core

    gpt = build(**model)
    attach(gpt.chunks, options)
    gpt.backward(0)
    with mock.patch.object(megatron.core, "__version__", release or megatron.core.__version__):
        return refusal(gpt.update)


@needs_muon
def test_muon_of_an_older_megatron_is_refused_when_it_first_steps(pool):
    for told in pool.run(refused, muon("layout"), {}, "0.17.1", world_size=2):
        assert told.startswith("megatron.optimizer: 'muon' cannot be combined with gradient compression")
        assert "megatron-core 0.18" in told
    assert pool.run(refused, muon("replicated"), {"method": "none"}, "0.17.1", world_size=2) == ["", ""]


@needs_muon
def test_onebit_adam_refuses_muon_when_it_first_steps(pool):
    onebit = {"method": "onebit_adam", "warmup_steps": 1}
    for told in pool.run(refused, muon("layout"), onebit, world_size=2):
        assert told == (
            "megatron.optimizer: 'TensorParallelMuon' cannot be combined with gradient compression: "
            "onebit_adam is Adam; use adam"
        )


def attached_before_muon(options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the method before the first step of a loop without Megatron's flags, and after it."""
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
    return {
        "before": set(before),
        "after": {state.config.method for state in states},
        "beta": {sender.error.beta for sender in senders},
        "ratios": ratios,
    }


@needs_muon
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
