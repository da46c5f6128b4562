"""pretrain_scripts/own_loop.py: short, shown whole in docs/api.md, and it trains as it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "pretrain_scripts" / "own_loop.py"
PAGE = ROOT / "docs" / "api.md"
LINE = re.compile(
    r"loss (\S+)  step (\d+): loco, 4 bits( \(not compressed in this step\))?: "
    r"(\S+) bits/gradient, (\S+) bits/weight; "
    r"this rank sent \S+ MB of gradients and \S+ MB of weights; error state 0\.478 MB"
)


def test_it_is_shown_whole_and_has_40_lines_of_code() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert f"\n```python\n{source}```\n" in PAGE.read_text(encoding="utf-8")
    docstring, *rest = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    lines = {n for statement in rest for n in range(statement.lineno, (statement.end_lineno or 0) + 1)}
    code = [line for n, line in enumerate(source.splitlines(), start=1) if n in lines and line.strip()]
    assert len(code) <= 40


def test_it_trains_on_two_ranks_and_prints_reports(tmp_path: Path) -> None:
    (tmp_path / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    docstring = ast.get_docstring(ast.parse(SCRIPT.read_text(encoding="utf-8"))) or ""
    (given,) = re.findall(r"    torchrun (.*--compression-device cpu)", docstring)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *given.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [LINE.fullmatch(line) for line in run.stdout.splitlines()]
    assert all(lines), run.stdout
    losses = [float(line[1]) for line in lines if line]
    assert [int(line[2]) for line in lines if line] == [5, 10, 15, 20, 25, 30]
    assert losses[-1] < losses[0] - 1, "from a byte at random, ln 256 = 5.5, to what Python looks like"
    # A constant rate may be a warm-up's first stair: `start_step: auto` waits ten steps.
    assert [int(line[2]) for line in lines if line and line[3]] == [5, 10]
    for line in filter(None, lines):
        assert float(line[4]) == 16 if line[3] else 4.1 < float(line[4]) < 4.5
        assert 1 < float(line[5]) < 16
