"""Ablations: what a definition means, what a folder says, and what the numbers are, without training."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats

from megatron_patch.errors import UserError
from megatron_patch.workflows import plots
from megatron_patch.workflows.ablation import definition
from megatron_patch.workflows.ablation.command import write
from megatron_patch.workflows.ablation.definition import Ablation, Run
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.ablation.statistics import interval, percent
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import run_folder
from megatron_patch.workflows.run.configuration import shipped
from megatron_patch.workflows.run.run_folder import State

READY = [
    *sorted(shipped("configs/ablations").glob("*.yaml")),
    *sorted((Path(__file__).parents[3] / "benchmarks/ablations").glob("*.yaml")),
]
TEXT = """\
base: configs/models/llama_tiny.yaml
seeds: [3, 1]
overrides: {megatron.train_iters: 20}
baseline: {compression.method: none}
grid:
  compression.method: [naive, loco]
  compression.bits: [4, 2]
cells:
  - {compression.method: loco, compression.error_beta: 0.5, compression.save_error: false}
contrast: compression.method
"""


def define(folder: Path, text: str = TEXT) -> Path:
    path = folder / "trial.yaml"
    path.write_text(text)
    return path


def test_a_definition_is_its_grid_and_its_cells_over_the_seeds(tmp_path: Path) -> None:
    ablation = definition.read(define(tmp_path), ["megatron.lr=1e-3"])
    assert [cell.name for cell in ablation.cells] == [
        "method=none",
        "method=naive,bits=4",
        "method=naive,bits=2",
        "method=loco,bits=4",
        "method=loco,bits=2",
        "method=loco,error_beta=0.5,save_error=false",
    ]
    runs = ablation.runs(tmp_path / "out")
    assert [run.seed for run in runs] == [3] * 6 + [1] * 6, "seed by seed: complete pairs as early as can be"
    last = runs[-1]
    assert last.folder == tmp_path / "out/method=loco,error_beta=0.5,save_error=false/seed-1"
    flags = last.configured.megatron
    assert (flags["train_iters"], flags["lr"], flags["seed"]) == (20, 1e-3, 1)
    assert (last.configured.compression.beta, last.configured.compression.save_error) == (0.5, False)
    # The command line changes base and seeds; a value that is a path makes no folders.
    runs = definition.read(define(tmp_path), (), "configs/models/moe_tiny.yaml", [7]).runs(tmp_path)
    assert {(run.seed, run.configured.megatron["num_experts"]) for run in runs} == {(7, 4)}
    cell = definition.Cell({"launch.script": "../other script.py", "megatron.lr": 1e-3})
    assert cell.name == "script=.._other_script.py,lr=0.001"
    assert cell.overrides == ["launch.script=../other script.py", "megatron.lr=0.001"]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_made_ones(path: Path, tmp_path: Path) -> None:
    """The runs that the first line announces are as many; every shipped cell is a configuration."""
    ablation = definition.read(path)
    assert f" {len(ablation.cells) * len(ablation.seeds)} runs" in " ".join(path.read_text().splitlines()[:4])
    assert ablation.baseline.settings["compression.method"] == "none"
    if path.is_relative_to(shipped("configs")):
        assert definition.find(path.stem) == path
        runs = ablation.runs(tmp_path)
        assert len({repr(run.configured) for run in runs}) == len(runs), "no two runs are the same"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("contrast:", "contrsat:", "contrsat.*did you mean contrast"),
        ("contrast: compression.method", "contrast: compression.beta", r"contrast.*compression\.beta"),
        ("[3, 1]", "[1, 1]", "seeds.*different"),
        ("[4, 2]", "4", r"grid.*compression\.bits.*list"),
        ("[4, 2]", "[4, 5]", "cell method=naive,bits=5.*bits.*8, 4, 2, 1"),
        ("[4, 2]", "[4, 4]", "bits=4.*twice"),
        ("compression.bits:", "bits:", r"grid.*'bits'.*section\.key"),
        ("{megatron.train_iters: 20}", "{megatron.seed: 20}", r"megatron\.seed.*seeds"),
        ("llama_tiny", "lama_tiny", r"lama_tiny\.yaml.*did you mean llama_tiny\.yaml"),
        ("{megatron.train_iters: 20}", "{launch.nnodes: 2}", r"launch\.nnodes.*Slurm"),
    ],
)
def test_mistakes(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(UserError, match=words) as caught:
        definition.read(define(tmp_path, TEXT.replace(old, new))).runs(tmp_path)
    assert "\n" not in str(caught.value)


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["bits_by_metod"], "did you mean bits_by_method"),
        (["bits", "--seeds", "1,x"], "1,x"),
        (["bits", "--task", "999"], "task: 999"),
        (["bits", "--dry-run", "--collect"], "not allowed with"),
    ):
        assert main(["ablate", *arguments, "--out", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def summary(loss: float | None, steps: int = 20) -> dict[str, object]:
    return {
        "valid_loss": loss,
        "train_loss": 1.0,
        "steps": steps,
        "world_size": 4,
        "device": "cpu",
        "gradient_wire": {"bytes_per_step": 10.0, "bits_per_element": 4.125},
        "weight_wire": {"bytes_per_step": 20.0, "bits_per_element": 32.0},
        "compensation_bytes": 30,
        "versions": {"torch": "2"},
    }


def leave(run: Run, loss: float | None, steps: int = 20) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(run.configured.as_yaml())
    (run.folder / "summary.json").write_text(json.dumps(summary(loss, steps)))
    records = [{"step": step, "loss": (loss or 1.0) + 1 / step} for step in (5, 10, 20)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    return definition.read(define(tmp_path))


def test_what_a_folder_says(ablation: Ablation, tmp_path: Path) -> None:
    first, second = ablation.runs(tmp_path / "out")[:2]

    def now() -> State:
        return run_folder.look(first.folder, first.configured)

    assert now() is State.NEW
    leave(first, 2.0)
    assert now() is State.DONE
    leave(first, 2.0, steps=12)
    assert now() is State.INTERRUPTED, "Megatron saved and ended when it was asked to"
    (first.folder / "summary.json").unlink()
    assert now() is State.INTERRUPTED
    run_folder.note_failure(first.folder, "rank 1 failed: out of memory\ntraceback")
    assert now() is State.FAILED
    run_folder.forget_failure(first.folder)
    assert now() is State.INTERRUPTED
    (first.folder / "config.yaml").write_text(second.configured.as_yaml())
    assert now() is State.NEW, "begun with other settings, but nothing came of it"
    leave(second, 2.0)
    assert run_folder.look(second.folder, first.configured) is State.CHANGED
    (second.folder / "config.yaml").write_text("megatron: {nu")
    (second.folder / "summary.json").unlink()
    assert run_folder.look(second.folder, second.configured) is State.NEW, "torn by a kill"


def test_runs_of_another_configuration_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = define(tmp_path), tmp_path / "out"
    for run in definition.read(path).runs(out)[:3]:
        leave(run, 2.0)
    assert main(["ablate", str(path), "megatron.lr=5e-4", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "method=none/seed-3 holds a run of another configuration" in error
    assert "--overwrite" in error
    assert main(["ablate", str(path), "--out", str(out), "--dry-run"]) == 0
    assert capsys.readouterr().out.count(" done ") == 3


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    rng = np.random.default_rng(5)
    for n in (2, 3, 12):
        reference = {seed: float(loss) for seed, loss in enumerate(rng.normal(2, 0.1, n))}
        losses = {seed: loss + float(rng.normal(0.01, 0.02)) for seed, loss in reference.items()}
        found = interval(list(percent(losses, reference).values()))
        assert found is not None
        differences = [100 * (losses[seed] / reference[seed] - 1) for seed in reference]
        wanted = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
        assert found.mean == pytest.approx(np.mean(differences))
        assert found.spread == pytest.approx(np.std(differences, ddof=1))


def test_what_can_be_said() -> None:
    assert interval([]) is None
    for values, verdict in (
        ([1.0], "one seed"),
        ([1.0, -1.0], "contains zero"),
        ([1.0, 1.1], "worse"),
        ([-1.0, -1.1], "better"),
    ):
        found = interval(values)
        assert found is not None
        assert found.verdict == verdict
    assert percent({1: 2.0, 2: 3.0}, {1: 4.0}) == {1: -50.0}, "only seeds that both have"


def test_results(ablation: Ablation, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = ablation.runs(out)
    losses = {
        "method=none": (2.0, 2.2),
        "method=naive,bits=4": (2.02, 2.222),
        "method=naive,bits=2": (2.4, 2.2),
        "method=loco,bits=4": (1.98, 2.178),
        "method=loco,bits=2": (float("nan"), 2.42),
        "method=loco,error_beta=0.5,save_error=false": (2.0, None),
    }
    for run in runs:
        leave(run, losses[run.cell.name][ablation.seeds.index(run.seed)])
    (runs[-1].folder / "summary.json").unlink()
    run_folder.note_failure(runs[-1].folder, "rank 0 failed")

    results = Results(ablation, runs)
    rows = {row[0]: row[1:] for row in results.rows()}
    assert rows["method=none"][:3] == ("2 of 2", "2.1000 ± 0.1414", "-")
    assert rows["method=naive,bits=4"][:5] == (
        "2 of 2",
        "2.1210 ± 0.1428",
        "+1.00 %",
        "+1.00 to +1.00",
        "worse",
    )
    assert rows["method=loco,bits=2"][:3] == ("1 of 2", "2.4200", "+10.00 %"), "NaN is no loss"
    assert rows["method=naive,bits=4"][5:] == ("4.12", "32.00", "0.00")
    contrasts = {row[0]: row[1:] for row in results.contrast_rows()}
    assert list(contrasts) == ["loco against naive, bits=4", "loco against naive, bits=2"]
    assert contrasts["loco against naive, bits=4"] == ("2", "-1.98 %", "-1.98 to -1.98", "better")
    assert contrasts["loco against naive, bits=2"][1] == "+10.00 %"

    write(results, out)
    with (out / "results.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 12
    assert [float(line["valid_loss"]) for line in lines[:2]] == [2.0, 2.02]
    assert float(lines[1]["difference_percent"]) == pytest.approx(1.0)
    assert (lines[1]["compression.method"], lines[1]["compression.bits"]) == ("naive", "4")
    assert lines[0]["compression.bits"] == ""
    later = ["weight_bits_per_element", "world_size", "device", "versions", "configuration", "test_loss"]
    assert (lines[1]["weight_bits_per_element"], list(lines[1])[-6:]) == ("32.0", later)
    assert (lines[-1]["state"], lines[-1]["valid_loss"]) == ("failed", "")
    assert lines[-1]["weight_bits_per_element"] == ""
    text = (out / "ablation.md").read_text()
    assert "loco,error_beta=0.5,save_error=false seed 1: failed" in text
    assert "| method=naive,bits=4 | 2 of 2 | 2.1210 ± 0.1428 | +1.00 % |" in text
    plots.draw_differences(out / "differences.png", results)
    check_picture(out / "differences.png")


def check_picture(path: Path) -> None:
    """Something is drawn, and nothing cut off."""
    pixels = imread(path)[..., :3]
    assert pixels.min() < 0.2
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert edge.min() == 1, f"{path.name}: something is cut off"


def test_results_of_a_part(ablation: Ablation, tmp_path: Path) -> None:
    """--collect while runs are still missing, and with none at all."""
    runs = ablation.runs(tmp_path)
    for count in (0, 3):
        for run in runs[:count]:
            leave(run, 2.0)
        results = Results(ablation, runs)
        lines = list(csv.DictReader(io.StringIO(results.csv())))
        assert [line["state"] for line in lines] == ["done"] * count + ["not run"] * (12 - count)
        plots.draw_differences(tmp_path / "differences.png", results)
        plots.draw_curves(tmp_path / "curves.png", results)
    assert "one seed" in results.markdown()
