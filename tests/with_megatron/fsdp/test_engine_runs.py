"""Megatron's FSDPs in its engine: `none` and the exact gather are stock, LoCo trains, starts and resumes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from with_megatron.fsdp.fsdp_runs import log, records
from workflows.engine_runs import EXPERTS, LOCO, NONE, STEPS, UNTIED, Run, engine
from workflows.test_engine import losses

FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy"]
GRADS = [*UNTIED, "--bf16", *FSDP, "optim_grads"]
PARAMS = [*UNTIED, "--bf16", *FSDP, "optim_grads_params"]
LONG = ["--train-iters", "50", "--ddp-bucket-size", "30000"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
INSTANCES = [*GRADS, "--overlap-grad-reduce", "--num-distributed-optimizer-instances", "2"]
EXACT = ["--compression-weight-gather", "exact"]
TORCH_FP32 = [*UNTIED, "--use-torch-fsdp2", "--ckpt-format", "torch_dcp"]
TORCH = [*TORCH_FP32, "--bf16"]
TENSOR = [*UNTIED, "--use-torch-fsdp2", "--bf16", "--tensor-model-parallel-size", "2"]


def torch_run(flags: list[str], ours: list[str] | None, **more: Any) -> Run:
    return Run(flags, ours, without=("--use-distributed-optimizer",), **more)


pytestmark = pytest.mark.slow

RUNS = {
    "stock": Run([*GRADS, *LONG]),
    "none": Run([*GRADS, *LONG], NONE),
    "exact": Run([*GRADS, *LONG], [*NONE, *EXACT]),
    "loco": Run([*GRADS, *LONG], LOCO),
    "stock-overlap": Run([*GRADS, *LONG, *OVERLAP]),
    "exact-overlap": Run([*GRADS, *LONG, *OVERLAP], [*NONE, *EXACT]),
    "stock-params": Run(PARAMS),
    "none-params": Run(PARAMS, NONE),
    "loco-params": Run(PARAMS, LOCO),
    "stock-params-fp32": Run([*UNTIED, *FSDP, "optim_grads_params"]),
    "none-params-fp32": Run([*UNTIED, *FSDP, "optim_grads_params"], NONE),
    "stock-experts": Run([*GRADS, *EXPERTS], ranks=4),
    "exact-experts": Run([*GRADS, *EXPERTS], [*NONE, *EXACT], ranks=4),
    "stock-instances": Run(INSTANCES, ranks=4),
    "none-instances": Run(INSTANCES, NONE, ranks=4),
    "loco-instances": Run(INSTANCES, LOCO, ranks=4),
    "stock-torch-fp32": torch_run(TORCH_FP32, None),
    "none-torch-fp32": torch_run(TORCH_FP32, NONE),
    "stock-torch": torch_run(TORCH, None),
    "none-torch": torch_run(TORCH, NONE),
    "loco-torch": torch_run([*TORCH, "--save", "{out}/saved", "--save-interval", "3"], LOCO),
    "resumed": torch_run(
        [*TORCH, "--load", "{out}/saved", "--ckpt-step", "3"],
        LOCO,
        after="loco-torch",
        repair="loading of torch_dcp",
    ),
    "auto": torch_run([*TORCH, "--lr-warmup-iters", "2"], ["--compression-method", "loco"]),
    "default": torch_run(TORCH, ["--compression-start-step", "0"]),
    "stock-torch-tensor": torch_run(TENSOR, None, ranks=4),
    "loco-torch-tensor": torch_run(TENSOR, LOCO, ranks=4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs."""
    return engine(tmp_path_factory.mktemp("fsdp"), RUNS)


@pytest.mark.parametrize("kind", [name for name in RUNS if name.startswith(("none", "exact"))])
def test_losses_and_norms_are_the_same_to_the_last_bit(runs: Path, kind: str) -> None:
    assert losses(runs / kind) == losses(runs / re.sub("^(none|exact)", "stock", kind))


@pytest.mark.parametrize("kind", ["exact", "exact-overlap", "exact-experts"])
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


@pytest.mark.parametrize("kind", ["", "-params", "-instances", "-torch", "-torch-tensor"])
def test_loco_trains_in_low_bits(runs: Path, kind: str) -> None:
    stock, loco = losses(runs / f"stock{kind}"), losses(runs / f"loco{kind}")
    assert loco != stock
    steps = 50 if not kind else STEPS
    assert loco[:steps] == pytest.approx(stock[:steps], rel=0.02 if "torch" in kind else 0.03)
    low = records(runs / f"loco{kind}")[-1]
    assert low["compressed"]
    assert 4 < low["gradient_wire_bits_per_element"] < 4.6
    assert low["compression_snr_db"] > 10
    assert (low["gradient_intra_node_bytes"] > 0) == (kind == "-instances")
    if f"none{kind}" in RUNS:
        full = records(runs / f"none{kind}")[-1]
        assert full["gradient_wire_bits_per_element"] == 16
        assert full["gradient_intra_node_bytes"] == low["gradient_intra_node_bytes"]


def test_sharded_weights_are_gathered_more_often(runs: Path) -> None:
    """Twice in each of two microbatches, of which one or two are saved by buckets kept."""
    once = records(runs / "none")[-1]["weight_wire_bytes"]
    assert records(runs / "none-params")[-1]["weight_wire_bytes"] > 2 * once


def test_torch_s_fsdp_exchanges_every_microbatch(runs: Path) -> None:
    """Half of each of the two goes to the other rank, 2 bytes an element."""
    (elements,) = re.findall(r"over 2 ranks: ([\d,]+) gradient elements", log(runs / "loco-torch"))
    full = records(runs / "none-torch")[-1]
    assert full["gradient_wire_bytes"] == 2 * int(elements.replace(",", "")) / 2 * 2
    summary = json.loads((runs / "loco-torch" / "summary.json").read_text())
    assert (summary["method"], summary["events"]["steps"]) == ("loco", STEPS)


def test_errors_are_in_torch_dcp_checkpoints(runs: Path) -> None:
    """The first step after a resume exchanges the same gradients with the same errors. (Its update is not
    the same: megatron-core 0.19.2 does not load Adam's state of such a checkpoint, with or without us.)"""
    assert "step 3: error states restored exactly" in log(runs / "resumed")
    resumed, straight = records(runs / "resumed")[0], records(runs / "loco-torch")[3]
    for name in ("step", "loss", "grad_norm", "compression_snr_db", "compensation_norm_ratio"):
        assert resumed[name] == straight[name]


def test_compression_starts_by_megatron_s_own_steps(runs: Path) -> None:
    """In bf16 its optimizer holds copies of the parameters: torch's own hooks would never see a step."""
    assert "compression starts at step 5" in log(runs / "auto")
    assert [record["compressed"] for record in records(runs / "auto")] == [False] * 4 + [True] * 2


def test_naive_is_the_default_and_says_why(runs: Path) -> None:
    assert json.loads((runs / "default" / "summary.json").read_text())["method"] == "naive"
    assert "naive is the default without replicas" in log(runs / "default")
