"""results.csv read back: what an ablation need not make again where its runs' folders are gone."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
from workflows.ablation.test_ablation import define, leave

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.workflows import plots
from megatron_patch.workflows.ablation import definition, records
from megatron_patch.workflows.ablation.results import Results
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run.configuration import RunConfig


def made(folder: Path, count: int) -> tuple[Path, Path]:
    """A definition of 12 runs of which `count` were made, without their folders; and their results.csv."""
    path, out = define(folder), folder / "out"
    ablation = definition.read(path)
    runs = ablation.runs(out)
    for index, run in enumerate(runs[:count]):
        leave(run, None if index == 2 else math.nan if index == 3 else 2.0 + index / 100)
    found = Results(ablation, runs)
    results = folder / "elsewhere.csv"
    results.write_text(found.csv())
    records.beside(results).write_text(records.curves_text(found.logged))
    shutil.rmtree(out)
    return path, results


def test_the_file_alone_gives_the_same_file(tmp_path: Path) -> None:
    path, results = made(tmp_path, 12)
    ablation = definition.read(path)
    runs = ablation.runs(tmp_path / "out")
    lines = records.read_curves(records.beside(results))
    found = Results(ablation, runs, records.read(results), lines)
    assert found.csv() == results.read_text()
    assert records.curves_text(found.logged) == records.beside(results).read_text()
    assert "4 ranks, 20 steps, cpu" in found.markdown()
    plots.draw_curves(tmp_path / "curves.png", found)
    assert (tmp_path / "curves.png").exists()
    # A folder goes before the file.
    leave(runs[0], 7.0)
    assert Results(ablation, runs, records.read(results)).losses(ablation.baseline)[3] == 7.0


def test_what_the_file_has_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = made(tmp_path, 5)
    out = tmp_path / "out"
    asked = ["ablate", str(path), "--out", str(out), "--results", str(results)]
    for more, done in (
        ([], 5),
        (["--seeds", "1"], 0),  # those of seed 3 are no other seed's
        (["megatron.lr=1e-4"], 0),  # another configuration
    ):
        assert main([*asked, "--dry-run", *more]) == 0
        assert capsys.readouterr().out.count(" done ") == done
    assert main([*asked, "--collect"]) == 0
    assert (out / "results.csv").read_text() == results.read_text()
    assert records.beside(out / "results.csv").read_text() == records.beside(results).read_text()
    capsys.readouterr()
    assert main(["ablate", str(path), "--out", str(out), "--dry-run"]) == 0, "where `ablate` itself leaves it"
    assert capsys.readouterr().out.count(" done ") == 5


def test_a_digest_is_of_what_a_run_computes() -> None:
    plain = RunConfig({"lr": 1e-3, "seed": 1})
    same = dataclasses.replace(plain, launch=dataclasses.replace(plain.launch, max_restarts=3))
    assert records.digest(plain) == records.digest(same)
    others = [
        RunConfig({"lr": 1e-3, "seed": 2}),
        dataclasses.replace(plain, compression=CompressionConfig(bits=2)),
        dataclasses.replace(plain, compression=CompressionConfig(block_size=64)),
        dataclasses.replace(plain, launch=dataclasses.replace(plain.launch, nproc_per_node=4)),
        dataclasses.replace(plain, attach=False),
    ]
    assert len({records.digest(run) for run in [plain, *others]}) == 6


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    _, results = made(tmp_path, 1)
    text = results.read_text()
    for old, new, words in (
        ("2.0,1.0,20,4.125", "two,1.0,20,4.125", "line 2: valid_loss: 'two' is no number"),
        ("2.0,1.0,20,4.125", "2.0,1.0,20.5,4.125", r"line 2: steps: '20\.5' is no number"),
        ("2.0,1.0,20,4.125", "2.0,1.0,20,inf", "line 2: gradient_bits_per_element: 'inf' is no number"),
        ('"{""torch"": ""2""}"', "[2]", "line 2: versions: must be a JSON object"),
        ("cell,seed", "cell,sead", r"no results\.csv"),
        ("cell,seed", "\0\0", r"elsewhere\.csv: "),
    ):
        assert old in text
        results.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match=words):
            records.read(results)
    with pytest.raises(UserError, match=r"none\.csv: cannot be read: No such file"):
        records.read(tmp_path / "none.csv")
