"""`--use-torch-fsdp2` in Megatron's own engine: `none` is stock, LoCo trains, starts and resumes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from workflows.engine_runs import LOCO, NONE, STEPS, UNTIED, Run, engine
from workflows.test_engine import losses

FP32 = [*UNTIED, "--use-torch-fsdp2", "--ckpt-format", "torch_dcp"]
BF16 = [*FP32, "--bf16"]
TENSOR = [*UNTIED, "--use-torch-fsdp2", "--bf16", "--tensor-model-parallel-size", "2"]
DISTRIBUTED = ("--use-distributed-optimizer",)


def run(flags: list[str], ours: list[str] | None, **more: Any) -> Run:
    return Run(flags, ours, without=DISTRIBUTED, **more)


pytestmark = pytest.mark.slow

RUNS = {
    "stock": run(FP32, None),
    "none": run(FP32, NONE),
    "stock-bf16": run(BF16, None),
    "none-bf16": run(BF16, NONE),
    "loco-bf16": run([*BF16, "--save", "{out}/saved", "--save-interval", "3"], LOCO),
    "resumed": run(
        [*BF16, "--load", "{out}/saved", "--ckpt-step", "3"],
        LOCO,
        after="loco-bf16",
        repair="loading of torch_dcp",
    ),
    "auto": run([*BF16, "--lr-warmup-iters", "2"], ["--compression-method", "loco"]),
    "default": run(BF16, ["--compression-start-step", "0"]),
    "tensor": run([*TENSOR], LOCO, ranks=4),
    "stock-tensor": run([*TENSOR], None, ranks=4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs."""
    folder = tmp_path_factory.mktemp("fsdp2")
    return engine(folder, RUNS)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path) -> str:
    return (folder / "rank-0.log").read_text()


@pytest.mark.parametrize("kind", ["", "-bf16"])
def test_method_none_is_megatron_s_own(runs: Path, kind: str) -> None:
    assert losses(runs / f"none{kind}") == losses(runs / f"stock{kind}")


def test_loco_trains_and_its_metrics_count_every_microbatch(runs: Path) -> None:
    stock, loco = losses(runs / "stock-bf16"), losses(runs / "loco-bf16")
    assert loco != stock
    assert loco[:STEPS] == pytest.approx(stock[:STEPS], rel=0.02)
    full, low = records(runs / "none-bf16")[-1], records(runs / "loco-bf16")[-1]
    assert full["gradient_wire_bits_per_element"] == 16
    assert 4 < low["gradient_wire_bits_per_element"] < 4.5
    assert low["compressed"]
    assert low["compression_snr_db"] > 10
    (elements,) = re.findall(r"over 2 ranks: ([\d,]+) gradient elements", log(runs / "loco-bf16"))
    # Both microbatches of a step are exchanged, and half of each goes to the other rank, 2 bytes an element.
    assert full["gradient_wire_bytes"] == 2 * int(elements.replace(",", "")) / 2 * 2
    summary = json.loads((runs / "loco-bf16" / "summary.json").read_text())
    assert summary["method"] == "loco"
    assert summary["events"]["steps"] == STEPS


def test_errors_are_in_torch_dcp_checkpoints(runs: Path) -> None:
    """The first step after a resume exchanges the same gradients with the same errors. (Its update is not
    the same: megatron-core 0.19.2 does not load Adam's state of such a checkpoint, with or without us.)"""
    assert "step 3: error states restored exactly" in log(runs / "resumed")
    resumed, straight = records(runs / "resumed")[0], records(runs / "loco-bf16")[3]
    for name in ("step", "loss", "grad_norm", "compression_snr_db", "compensation_norm_ratio"):
        assert resumed[name] == straight[name]


def test_compression_starts_by_megatron_s_own_steps(runs: Path) -> None:
    """In bf16 its optimizer holds copies of the parameters: torch's own hooks would never see a step."""
    assert "compression starts at step 5" in log(runs / "auto")
    assert [record["compressed"] for record in records(runs / "auto")] == [False] * 4 + [True] * 2


def test_naive_is_the_default_and_says_why(runs: Path) -> None:
    assert json.loads((runs / "default" / "summary.json").read_text())["method"] == "naive"
    assert "naive is the default without replicas" in log(runs / "default")


def test_tensor_parallel_ranks_keep_their_copies_equal(runs: Path) -> None:
    found = losses(runs / "tensor")
    assert found[:STEPS] == pytest.approx(losses(runs / "stock-tensor")[:STEPS], rel=0.02)
    assert records(runs / "tensor")[-1]["compressed"]
