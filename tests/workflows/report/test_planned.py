"""`report --plan`: a plan's numbers and its chart are on the page, and a file that is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run
from workflows.plan.jobs import cluster, job

from megatron_patch.workflows import cli
from megatron_patch.workflows.plan import command as planner
from megatron_patch.workflows.plan import constants, methods, recommend
from megatron_patch.workflows.report import command

METHODS = [methods.parse(name) for name in ("stock", "loco4", "loco4_exact")]


def plan(nodes: int = 2) -> dict[str, Any]:
    one, on = job(batch=16), cluster(nodes=nodes, bandwidth=1e8)
    found = recommend.rows(one, on, METHODS)
    curves = recommend.curves(one, on, METHODS) if nodes > 1 else {}
    advice = recommend.advise(one, on, found, 0.03)
    return json.loads(json.dumps(planner.as_json(one, on, constants.GPUS["H100"], found, advice, curves)))


def test_the_page_has_the_plans_table_and_chart(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/one")
    (tmp_path / "plan.json").write_text(json.dumps(plan()), encoding="utf-8")
    out = tmp_path / "report.html"
    assert (
        cli.main(
            ["report", str(tmp_path / "runs/one"), "--plan", str(tmp_path / "plan.json"), "--out", str(out)]
        )
        == 0
    )
    page = out.read_text(encoding="utf-8")
    assert "Predicted: small on 2 x 8 ranks" in page
    assert plan()["reason"].split(";")[0] in page.replace("&#39;", "'")
    assert 'aria-label="Predicted speed over bandwidth' in page
    assert page.count('class="curve curve-2"') >= 1
    bare = tmp_path / "bare.html"
    assert cli.main(["report", str(tmp_path / "runs/one"), "--out", str(bare)]) == 0
    assert "Predicted" not in bare.read_text(encoding="utf-8")


def test_a_section_has_a_row_a_method_and_no_chart_on_one_node() -> None:
    found = command.plan_of(plan())
    assert [row[0].split(" ")[0] for row in found.rows] == [method.name for method in METHODS]
    assert sum("(recommended)" in row[0] for row in found.rows) == 1
    assert len(found.legend) == 3
    assert command.plan_of(plan(nodes=1)).svg == ""


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}'])
def test_a_file_that_is_no_plan(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    (tmp_path / "other.json").write_text(content, encoding="utf-8")
    out = tmp_path / "report.html"
    arguments = ["report", str(tmp_path / "one"), "--plan", str(tmp_path / "other.json"), "--out", str(out)]
    assert cli.main(arguments) == 2
    assert "--plan: " in capsys.readouterr().err
    assert not out.exists()
