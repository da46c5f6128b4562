"""`python -m benchmarks.planner` prints what docs/plan.md shows, and the predictions are that good."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
from workflows.plan.jobs import cluster, job

from benchmarks.command_line import main
from benchmarks.planner import check, command
from megatron_patch.workflows.plan.cluster import COLLECTIVES
from megatron_patch.workflows.plan.methods import parse
from megatron_patch.workflows.plan.step import simulate

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_it_prints_all_cells_and_the_summary_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, []) == 0
    printed = capsys.readouterr().out
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    rows = [line for line in printed.splitlines() if "%" in line or (" / " in line and line.startswith("|"))]
    numbers = [line for line in rows if "within" not in line]
    assert len(numbers) == 6 + 8 * 2 + 4 * 2
    assert all(line in page for line in numbers[:6])
    assert "predicted on 14 of 16 shaped links" in printed
    assert "14 of 16 shaped" in page


def test_gloos_all_reduce_moves_as_much_as_nccls_and_its_reduce_scatter_twice_as_much() -> None:
    one = dataclasses.replace(job(batch=16, overlap=False), gradient_bytes=2)
    nccl = cluster(nodes=16, per_node=1, latency=0.0)
    free = {("all", kind): (0.0, 0.0) for kind in COLLECTIVES}
    gloo = check.Hosts(nccl.nodes, nccl.per_node, nccl.between, nccl.inside, nccl.processor, transport=free)
    replicated, sharded = (
        [simulate(one, on, parse(name)).uplink_bytes for on in (nccl, gloo)]
        for name in ("stock_allreduce", "stock")
    )
    assert replicated[0] == replicated[1]
    weights = sharded[0] / 2  # They take as many bytes as the gradients.
    assert sharded[1] == pytest.approx(2 * (sharded[0] - weights) + weights)


def test_pytorchs_wrappings_are_predicted_as_the_page_says() -> None:
    cells = command.read(DOCS / "plan/pytorch.csv", DOCS / "plan/calibration.yaml")
    wrapped = {c.cell: c for c in cells if c.cell.name != "bf16_alltoall"}
    errors = [abs(c.error) for c in wrapped.values()]
    assert len(errors) == 30
    ratios = []
    for cell, low in wrapped.items():
        if cell.name.endswith("loco4"):
            stock = wrapped[dataclasses.replace(cell, name=cell.name.replace("loco4", "bf16"))]
            predicted, measured = stock.predicted / low.predicted, stock.measured / low.measured
            ratios.append(abs(predicted / measured - 1))
    steps = (
        f"{100 * statistics.median(errors):.1f} % off\nin the median and {100 * max(errors):.0f} % at worst"
    )
    of_ratios = f"{100 * statistics.median(ratios):.1f} and {100 * max(ratios):.1f} %"
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    assert f"steps are {steps}, speed-ups of 4 bits over bf16 in the same wrapping {of_ratios}." in page
