"""results_curves.csv and the pictures: what a run logged comes back, and a damaged file is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from workflows.ablation.test_ablation import check_picture, define, leave

from megatron_patch.errors import UserError
from megatron_patch.workflows import plots
from megatron_patch.workflows.ablation import definition, records
from megatron_patch.workflows.ablation.definition import Run
from megatron_patch.workflows.ablation.records import Point
from megatron_patch.workflows.ablation.results import Results

TEXT = """\
base: configs/models/llama_tiny.yaml
seeds: [1, 2, 3]
overrides: {megatron.train_iters: 20}
baseline: {compression.method: none}
cells:
  - {compression.method: naive, compression.bits: 4}
  - {compression.method: naive, compression.bits: 2}
"""
POINTS = st.builds(
    Point,
    step=st.integers(1, 10**9),
    loss=st.none() | st.integers(0, 10**6).map(lambda k: k / 1000),
    gradient_bits=st.integers(0, 32000).map(lambda k: k / 1000),
    weight_bits=st.integers(0, 32000).map(lambda k: k / 1000),
)


@given(st.lists(POINTS, max_size=5), st.lists(POINTS, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, first: list, second: list) -> None:
    folder = tmp_path_factory.mktemp("curves")
    runs = definition.read(define(folder, TEXT)).runs(folder / "out")[:2]
    path = folder / "results_curves.csv"
    path.write_text(records.curves_text(list(zip(runs, (first, second), strict=True))))
    assert list(records.read_curves(path).values()) == [points for points in (first, second) if points]
    assert records.beside(folder / "results.csv") == path
    assert records.read_curves(folder / "none.csv") == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cell,seed", "cell,sead", "no file of curves"),
        ("naive,1,5,2.5", "naive,1,five,2.5", "line 2: invalid literal"),
        ("naive,1,5,2.5", "naive,1,5,2.5,7", "line 2: too many values"),
        ("method", "\udcff", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    text = ",".join(records.CURVE_COLUMNS) + "\nmethod=naive,1,5,2.5,4.100,3.000,0123\n".replace(
        "=naive", "_naive"
    )
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=f"{path}.*{words}"):
        records.read_curves(path)


def test_the_picture_shows_loss_difference_and_bits(tmp_path: Path) -> None:
    """A definition without a contrast: a band needs two seeds, and NaN is left out."""
    ablation = definition.read(define(tmp_path, TEXT))
    rng = np.random.default_rng(3)
    runs = ablation.runs(tmp_path / "out")
    for run in runs:
        loss = {step: 5 * step**-0.2 + 0.02 * rng.standard_normal() for step in range(1, 201)}
        leave_curve(run, loss | {7: float("nan")})
    for seeds, name in ((3, "band.png"), (1, "one.png")):
        plots.draw_curves(tmp_path / name, Results(ablation, runs[: 3 * seeds]))
        check_picture(tmp_path / name)
    pale = [_pale(imread(tmp_path / name)[..., :3]) for name in ("band.png", "one.png")]
    assert pale[0] > 20 * max(pale[1], 100), "the band of intervals"


def leave_curve(run: Run, losses: dict[int, float]) -> None:
    """A run that is done, with these training losses by step."""
    leave(run, 2.0)
    records = [
        {
            "step": step,
            "loss": loss,
            "gradient_wire_bits_per_element": 4.1,
            "weight_wire_bits_per_element": 16.0 if "none" in run.cell.name else 5 - step / 1000,
        }
        for step, loss in losses.items()
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _pale(pixels: np.ndarray) -> int:
    """Pixels of the bands' colours: orange or green at 12 %."""
    colors = [1 - 0.12 * (1 - np.array(rgb)) for rgb in ((1, 0.498, 0.055), (0.173, 0.627, 0.173))]
    return sum(int((abs(pixels - color).max(-1) < 0.01).sum()) for color in colors)
