"""Less usual set-ups of Megatron's engine: the exact gather is stock bit for bit, 4 bits stay close."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workflows.engine_runs import LOCO, NONE, STEPS, UNTIED, Run, engine

PIPELINE = [*UNTIED, "--bf16", "--pipeline-model-parallel-size", "2"]
SET_UPS: dict[str, tuple[list[str], int]] = {
    "multi-token prediction": ([*UNTIED, "--bf16", "--mtp-num-layers", "1"], 2),
    "uneven stages": ([*PIPELINE, "--num-layers", "3", "--decoder-first-pipeline-num-layers", "1"], 4),
    "gathers within the optimizer's step": (
        [
            *(*PIPELINE, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"),
            *("--overlap-grad-reduce", "--overlap-param-gather"),
            # upstream: not with its distributed checkpoints
            *("--overlap-param-gather-with-optimizer-step", "--ckpt-format", "torch"),
        ],
        4,
    ),
}
EXACT = ["--compression-weight-gather", "exact"]
OURS = {"stock": None, "exact": [*NONE, *EXACT], "loco": [*LOCO, *EXACT]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = {
        f"{way} {name}": Run(flags, ours, ranks)
        for name, (flags, ranks) in SET_UPS.items()
        for way, ours in OURS.items()
    }
    return engine(tmp_path_factory.mktemp("corners"), asked)


def losses(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert set((folder / "exit").read_text().split()) == {"0"}, (folder / "rank-0.log").read_text()[-3000:]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag in ("lm loss", "grad-norm")]
    found = [event.value for tag in sorted(tags) for event in events.Scalars(tag)]
    assert len(found) >= 2 * STEPS
    return found


@pytest.mark.parametrize("name", SET_UPS)
def test_the_exact_gather_is_stock_and_four_bits_stay_close(runs: Path, name: str) -> None:
    stock, exact, loco = (losses(runs / f"{way} {name}") for way in OURS)
    assert exact == stock
    assert loco != stock
    assert loco == pytest.approx(stock, rel=0.05)
    summary = json.loads((runs / f"exact {name}" / "summary.json").read_text())
    assert summary["weight_wire"]["bits_per_element"] < 16
    in_step = summary["raw_weight_gathers"].get("inside_step", 0)
    assert bool(in_step) == ("within" in name)
