"""Multi-token prediction in Megatron's engine: the exact gather is stock, 4 bits stay close."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workflows.engine_runs import LOCO, NONE, UNTIED, Run, engine
from workflows.test_engine import losses

FLAGS = [*UNTIED, "--bf16", "--mtp-num-layers", "1"]
EXACT = ["--compression-weight-gather", "exact"]
OURS = {"stock": None, "exact": [*NONE, *EXACT], "loco": [*LOCO, *EXACT]}


def test_the_exact_gather_is_stock_and_four_bits_stay_close(tmp_path: Path) -> None:
    runs = engine(tmp_path, {way: Run(FLAGS, ours) for way, ours in OURS.items()})
    stock, exact, loco = (losses(runs / way) for way in OURS)
    assert exact == stock
    assert loco != stock
    assert loco == pytest.approx(stock, rel=0.05)
    assert json.loads((runs / "exact" / "summary.json").read_text())["weight_wire"]["bits_per_element"] < 16
