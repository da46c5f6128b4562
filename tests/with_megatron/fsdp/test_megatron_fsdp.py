"""Megatron-FSDP in Megatron's own engine: `none` and the exact gather are stock, LoCo trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workflows.engine_runs import EXPERTS, LOCO, NONE, STEPS, UNTIED, Run, engine
from workflows.test_engine import losses

FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy"]
GRADS = [*UNTIED, "--bf16", *FSDP, "optim_grads"]
FP32 = [*UNTIED, *FSDP, "optim_grads", "--no-gradient-reduce-div-fusion"]  # which gloo refuses
PARAMS = [*UNTIED, "--bf16", *FSDP, "optim_grads_params"]
LONG = ["--train-iters", "50", "--ddp-bucket-size", "30000"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
INSTANCES = [*GRADS, "--overlap-grad-reduce", "--num-distributed-optimizer-instances", "2"]
EXACT = ["--compression-weight-gather", "exact"]

pytestmark = pytest.mark.slow

RUNS = {
    "stock": Run([*GRADS, *LONG]),
    "none": Run([*GRADS, *LONG], NONE),
    "exact": Run([*GRADS, *LONG], [*NONE, *EXACT]),
    "loco": Run([*GRADS, *LONG], LOCO),
    "both": Run([*GRADS, *LONG], [*LOCO, *EXACT]),
    "stock-overlap": Run([*GRADS, *LONG, *OVERLAP]),
    "exact-overlap": Run([*GRADS, *LONG, *OVERLAP], [*NONE, *EXACT]),
    "loco-overlap": Run([*GRADS, *LONG, *OVERLAP], LOCO),
    "both-overlap": Run([*GRADS, *LONG, *OVERLAP], [*LOCO, *EXACT]),
    "stock-fp32": Run(FP32),
    "none-fp32": Run(FP32, NONE),
    "exact-fp32": Run(FP32, [*NONE, *EXACT]),
    "stock-params": Run(PARAMS),
    "none-params": Run(PARAMS, NONE),
    "loco-params": Run(PARAMS, LOCO),
    "default-params": Run(PARAMS, ["--compression-start-step", "0"]),
    "stock-experts": Run([*GRADS, *EXPERTS], ranks=4),
    "exact-experts": Run([*GRADS, *EXPERTS], [*NONE, *EXACT], ranks=4),
    "stock-instances": Run(INSTANCES, ranks=4),
    "none-instances": Run(INSTANCES, NONE, ranks=4),
    "loco-instances": Run(INSTANCES, LOCO, ranks=4),
    "auto": Run([*GRADS, "--lr-warmup-iters", "2"], ["--compression-method", "loco"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs."""
    folder = tmp_path_factory.mktemp("fsdp")
    return engine(folder, RUNS)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path) -> str:
    return (folder / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("kind", "stock"),
    [
        ("none", "stock"),
        ("none-fp32", "stock-fp32"),
        ("none-params", "stock-params"),
        ("none-instances", "stock-instances"),
        ("exact", "stock"),
        ("exact-overlap", "stock-overlap"),
        ("exact-fp32", "stock-fp32"),
        ("exact-experts", "stock-experts"),
        ("both", "loco"),
        ("both-overlap", "loco-overlap"),
    ],
)
def test_losses_and_norms_are_the_same_to_the_last_bit(runs: Path, kind: str, stock: str) -> None:
    assert losses(runs / kind) == losses(runs / stock)


@pytest.mark.parametrize("kind", ["exact", "exact-overlap", "exact-experts", "both-overlap"])
def test_the_exact_gather_is_used_in_every_step_but_the_first(runs: Path, kind: str) -> None:
    """The first gather follows no step, and is in full."""
    found = records(runs / kind)
    experts = 2 if "experts" in kind else 1
    assert found[-1]["raw_weight_gathers"]["not_coded"] % experts == 0
    assert set(found[-1]["raw_weight_gathers"]) == {"not_coded"}
    assert found[-1]["raw_weight_gathers"] == found[1]["raw_weight_gathers"]
    for record in found[2:]:
        assert 0 < record["weight_wire_bits_per_element"] < 12
    assert "from their changes, exactly" in log(runs / kind)
    if "overlap" in kind:  # only then Megatron makes several buckets
        assert len(found[-1]["weight_bits_by_bucket"]) > 2


def test_fp32_weights_stay_in_full(runs: Path) -> None:
    assert records(runs / "exact-fp32")[-1]["weight_wire_bits_per_element"] == 32
    assert "fp32 weights change in nearly all of their bits" in log(runs / "exact-fp32")


@pytest.mark.parametrize("kind", ["", "-params", "-instances"])
def test_loco_trains_in_low_bits(runs: Path, kind: str) -> None:
    stock, loco = losses(runs / f"stock{kind}"), losses(runs / f"loco{kind}")
    assert loco != stock
    steps = 50 if not kind else STEPS
    assert loco[:steps] == pytest.approx(stock[:steps], rel=0.03)
    low = records(runs / f"loco{kind}")[-1]
    assert low["compressed"]
    assert 4 < low["gradient_wire_bits_per_element"] < 4.6
    assert low["compression_snr_db"] > 10
    if f"none{kind}" in RUNS:
        full = records(runs / f"none{kind}")[-1]
        assert full["gradient_wire_bits_per_element"] == 16
        assert full["gradient_intra_node_bytes"] == low["gradient_intra_node_bytes"]
    assert (low["gradient_intra_node_bytes"] > 0) == (kind == "-instances")


def test_where_weights_are_sharded_naive_is_the_default(runs: Path) -> None:
    assert json.loads((runs / "default-params" / "summary.json").read_text())["method"] == "naive"
    assert "naive is the default without replicas" in log(runs / "default-params")
    # Two gathers of the weights in each of two microbatches, of which one or two are saved by buckets kept.
    once = records(runs / "none")[-1]["weight_wire_bytes"]
    assert records(runs / "none-params")[-1]["weight_wire_bytes"] > 2 * once


def test_compression_starts_by_megatron_s_own_steps(runs: Path) -> None:
    assert "compression starts at step 5" in log(runs / "auto")
    assert [record["compressed"] for record in records(runs / "auto")] == [False] * 4 + [True] * 2
