"""`megatron-loco plan`: its table, JSON and advice, and one line for each mistake."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.workflows.cli import main
from megatron_patch.workflows.plan import constants, methods

ROOT = Path(__file__).parents[3]
SEVEN_B = "configs/models/llama2_7b.yaml"


def planned(arguments: list[str], folder: Path) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json", str(folder / "plan.json")]) == 0
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))


def test_a_plan_has_a_row_a_method_a_reason_and_every_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned([SEVEN_B, "megatron.global_batch_size=128", "--inter-gbit", "100"], tmp_path)
    printed = capsys.readouterr().out
    assert [one["name"] for one in found["methods"]] == list(methods.DEFAULT)
    assert found["recommended"] == "loco4_exact"
    assert found["reason"] in printed
    assert "8 microbatches of 1 x 4096 tokens" in printed
    assert all(number["source"] for number in found["constants"].values())
    assert found["constants"].keys() == constants.CONSTANTS.keys()
    stock, exact = found["methods"][0], next(m for m in found["methods"] if m["name"] == "loco4_exact")
    assert exact["speedup"] == pytest.approx(stock["step_seconds"] / exact["step_seconds"])
    # fp32 gradients and bf16 weights in rings: 15/16 of 6 bytes a parameter leave each node.
    assert stock["node_uplink_bytes"] == pytest.approx(6.738e9 * 6 * 15 / 16, rel=0.01)


@pytest.mark.slow
def test_the_pages_jobs_are_what_the_command_says(tmp_path: Path) -> None:
    """docs/plan.md's table of jobs, from docs/plan/jobs.csv."""
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    with (ROOT / "docs/plan/jobs.csv").open(encoding="utf-8") as file:
        jobs = list(csv.DictReader(file))
    assert len(jobs) >= 10
    for one in jobs:
        plan = planned(shlex.split(one["arguments"]), tmp_path)
        by_name = {method["name"]: method for method in plan["methods"]}
        stock, best = by_name["stock"], by_name[plan["recommended"]]
        waits = 100 * stock["exposed_seconds"] / stock["step_seconds"]
        over_bf16 = by_name["stock_bf16"]["step_seconds"] / by_name["loco4_exact"]["step_seconds"]
        line = (
            f"| {one['job']} | `{one['arguments'].replace('configs/models/', '')}` | {plan['nodes']} x "
            f"{plan['gpus_per_node']} | {plan['microbatches']} | {stock['step_seconds']:.2f} | "
            f"{waits:.0f} % | {by_name['stock_bf16']['speedup']:.2f} x | "
            f"{by_name['loco4_exact']['speedup']:.2f} x | {over_bf16:.2f} x | "
            f"{plan['recommended']}, {best['speedup']:.2f} x |"
        )
        assert line in page, line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["megatron.lr=1e-4"], "no such configuration file"),
        ([SEVEN_B, "--inter-gbit", "0"], "--inter-gbit: 0 is not allowed; it must be above 0"),
        ([SEVEN_B, "--gpu", "H1000"], "--gpu: 'H1000' must be one of"),
        ([SEVEN_B, "--methods", "loco5"], "--methods: 'loco5' must be one of"),
        ([SEVEN_B, "--nodes", "3"], "global_batch_size"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error, error
    assert error.startswith("megatron-loco: error: ")
    assert not out.exists()
