"""pretrain_scripts/own_loop.py: short, shown whole in docs/api.md, and it trains as it says."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path

from worker_pool import in_warm_process
from workflows.engine_runs import fork_ranks

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "pretrain_scripts" / "own_loop.py"
PAGE = ROOT / "docs" / "api.md"
LINE = re.compile(
    r"loss (\S+)  step (\d+): loco, 4 bits( \(not compressed in this step\))?: "
    r"(\S+) bits/gradient, (\S+) bits/weight; "
    r"this rank sent \S+ MB of gradients and \S+ MB of weights; "
    r"waited (\S+) s for exchanges; error state 0\.478 MB"
)


def test_it_is_shown_whole_and_has_40_lines_of_code() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert f"\n```python\n{source}```\n" in PAGE.read_text(encoding="utf-8")
    docstring, *rest = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    lines = {n for statement in rest for n in range(statement.lineno, (statement.end_lineno or 0) + 1)}
    code = [line for n, line in enumerate(source.splitlines(), start=1) if n in lines and line.strip()]
    assert len(code) <= 40


def train(folder: Path) -> None:
    """In a process of its own: what the command of the script's docstring has two ranks do."""
    from megatron_patch.megatron import run_script

    main = functools.partial(run_script.main, [str(SCRIPT), "--compression-device", "cpu"])
    for _ in fork_ranks(2, folder, main):
        assert os.wait()[1] == 0, (folder / "rank-0.log").read_text()


def test_it_trains_on_two_ranks_and_prints_reports(tmp_path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(SCRIPT.read_text(encoding="utf-8"))) or ""
    command = "torchrun --nproc-per-node 2 -m megatron_patch.launch own_loop.py --compression-device cpu"
    assert f"    {command}\n" in docstring
    in_warm_process(train, tmp_path / "run", log=tmp_path / "log")
    found = list(filter(None, map(LINE.fullmatch, (tmp_path / "run/rank-0.log").read_text().splitlines())))
    losses = [float(line[1]) for line in found]
    assert [int(line[2]) for line in found] == [5, 10, 15, 20, 25, 30]
    assert losses[-1] < losses[0] - 1, "from a byte at random, ln 256 = 5.5, to what Python looks like"
    # A constant rate may be a warm-up's first stair: `start_step: auto` waits ten steps.
    assert [int(line[2]) for line in found if line[3]] == [5, 10]
    for line in found:
        assert float(line[4]) == 16 if line[3] else 4.1 < float(line[4]) < 4.5
        assert 1 < float(line[5]) < 16
        assert float(line[6]) > 0
