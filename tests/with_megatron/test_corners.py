"""Multi-token prediction on two stages in Megatron: the exact gather is stock, low bits stay close."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workflows.engine_runs import LOCO, NONE, UNTIED, Run, engine
from workflows.test_engine import losses

FLAGS = [*UNTIED, "--bf16", "--mtp-num-layers", "1", "--pipeline-model-parallel-size", "2"]
EXACT = ["--compression-weight-gather", "exact"]
ONEBIT = ["--compression-method", "onebit_adam", "--compression-warmup-steps", "3"]
OURS = {"stock": None, "exact": [*NONE, *EXACT], "loco": [*LOCO, *EXACT], "onebit": ONEBIT}


def test_the_exact_gather_is_stock_and_low_bits_stay_close(tmp_path: Path) -> None:
    runs = engine(tmp_path, {way: Run(FLAGS, ours, ranks=4) for way, ours in OURS.items()})
    stock, exact, *low = (losses(runs / way) for way in OURS)
    assert exact == stock
    for ours in low:
        assert ours != stock
        assert ours == pytest.approx(stock, rel=0.05)
    assert json.loads((runs / "exact" / "summary.json").read_text())["weight_wire"]["bits_per_element"] < 16
