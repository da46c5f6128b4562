"""`megatron-loco plan`: its table, JSON, chart and advice, and one line for each mistake."""

from __future__ import annotations

import csv
import itertools
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


def test_a_plan_has_a_row_a_method_a_reason_a_chart_and_every_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    arguments = [
        SEVEN_B,
        "megatron.global_batch_size=128",
        "--inter-gbit",
        "100",
        "--explain",
        "--out",
        str(out),
    ]
    found = planned(arguments, tmp_path)
    printed = capsys.readouterr().out
    assert [one["name"] for one in found["methods"]] == list(methods.DEFAULT)
    assert found["recommended"] == "loco4_exact"
    assert found["reason"] in printed
    assert "8 microbatches of 1 x 4096 tokens" in printed
    for name in constants.CONSTANTS:
        assert name in printed
    assert json.loads((out / "plan.json").read_text(encoding="utf-8")) == found
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    stock, exact = found["methods"][0], next(m for m in found["methods"] if m["name"] == "loco4_exact")
    assert exact["speedup"] == pytest.approx(stock["step_seconds"] / exact["step_seconds"])
    # fp32 gradients and bf16 weights in rings: 15/16 of 6 bytes a parameter leave each node.
    assert stock["node_uplink_bytes"] == pytest.approx(6.738e9 * 6 * 15 / 16, rel=0.01)
    slower, faster = found["curves"]["step_seconds"]["stock"][0], found["curves"]["step_seconds"]["stock"][-1]
    assert slower > stock["step_seconds"] > faster


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


def test_a_recipe_grows_from_8_to_4096_gpus(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    assert main(["plan", SEVEN_B, "configs/models/mixtral_8x7b.yaml", "--scale", "--json", str(file)]) == 0
    seven, mixture = json.loads(file.read_text(encoding="utf-8"))
    weak = [point for point in seven["scaling"] if point["kind"] == "weak"]
    assert [point["gpus"] for point in weak] == [2**power for power in range(3, 13)]
    assert {point["microbatches"] for point in weak} == {64}
    strong = [point for point in seven["scaling"] if point["kind"] == "strong"]
    assert all(one["stock_seconds"] > two["stock_seconds"] for one, two in itertools.pairwise(strong))
    assert all(0 < point["efficiency"] <= 1 for point in seven["scaling"] + mixture["scaling"])
    assert min(point["gpus"] for point in mixture["scaling"]) == 32


def test_a_run_that_was_made_gives_the_compute_rate(tmp_path: Path) -> None:
    """A step that the run took is what the plan says of the same job, with whatever rate that needs."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"defaults: [{ROOT / SEVEN_B}, {ROOT / 'configs/methods/none.yaml'}]\n", encoding="utf-8"
    )
    (run / "summary.json").write_text('{"step_seconds": {"median": 50.0}}', encoding="utf-8")
    found = planned([SEVEN_B, "--inter-gbit", "100", "--from", str(run)], tmp_path)
    assert found["methods"][0]["step_seconds"] == pytest.approx(50.0, rel=1e-3)
    assert found["methods"][0]["exposed_seconds"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["megatron.lr=1e-4"], "name a recipe"),
        (["configs/models/none.yaml"], "no such configuration file"),
        ([SEVEN_B, "--inter-gbit", "0"], "--inter-gbit: 0 is not allowed; it must be above 0"),
        ([SEVEN_B, "--mfu", "1.5"], "--mfu: 1.5 is not allowed"),
        ([SEVEN_B, "--weight-bits", "17"], "--weight-bits: 17 is not allowed"),
        ([SEVEN_B, "--worth", "-1"], "--worth: -1 is not allowed"),
        ([SEVEN_B, "--gpu", "H1000"], "--gpu: 'H1000' must be one of"),
        ([SEVEN_B, "--methods", "loco5"], "--methods: 'loco5' must be one of"),
        ([SEVEN_B, "--nodes", "3"], "global_batch_size"),
        ([SEVEN_B, "--cluster", "none.yaml"], "--cluster: none.yaml"),
        ([SEVEN_B, "--from", "nowhere"], "--from: nowhere: no run that has ended"),
        ([SEVEN_B, SEVEN_B, "--json", "plan.json"], "name a single recipe, or add --scale"),
        ([SEVEN_B, "--nods", "2"], "unrecognized arguments: --nods 2"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["plan", *arguments, *([] if "--json" in arguments else ["--out", str(out)])]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error, error
    assert error.startswith("megatron-loco: error: ")
    assert not out.exists()


def test_ranks_on_cpus_need_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = {"collective": "all_gather", "scope": "all", "ranks": 8, "bytes": 1000, "seconds": 1e-3}
    file = tmp_path / "links.yaml"
    file.write_text(
        f"gpus_per_node: 8\ndevice: cpu\ncores: 2\nlinks: [{json.dumps(curve)}]\n", encoding="utf-8"
    )
    arguments = ["plan", SEVEN_B, "--nodes", "1", "--cluster", str(file)]
    assert main(arguments) == 2
    assert "add --from RUN" in capsys.readouterr().err


def test_train_says_in_one_line_where_compression_gains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/models/llama_350m.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("# plan:")]
    assert "a single node compression is predicted to cost" in line
    assert "megatron-loco plan configs/models/llama_350m.yaml" in line
    for more in (["--with", "configs/methods/none.yaml"], ["launch.nnodes=4"]):
        assert main(["train", "configs/models/llama_350m.yaml", *more, "--dry-run"]) == 0
        assert "# plan:" not in capsys.readouterr().out
