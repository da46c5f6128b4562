"""results.csv read back: what an ablation need not make again where its runs' folders are gone."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    plots.draw_differences(tmp_path / "differences.png", found)
    plots.draw_curves(tmp_path / "curves.png", found)
    assert (tmp_path / "differences.png").exists()
    assert (tmp_path / "curves.png").exists()
    (tmp_path / "curves.png").unlink()
    plots.draw_curves(tmp_path / "curves.png", Results(ablation, runs, records.read(results)))
    assert not (tmp_path / "curves.png").exists(), "the file beside it had the curves"


@pytest.mark.parametrize("beside", [True, False])
def test_what_the_file_has_is_not_made_again(
    beside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = made(tmp_path, 5)
    out = tmp_path / "out"
    asked = ["ablate", str(path), "--out", str(out), "--dry-run"]
    if beside:  # where `ablate` itself leaves it
        out.mkdir()
        shutil.copy(results, out / "results.csv")
    else:
        asked += ["--results", str(results)]
    assert main(asked) == 0
    assert capsys.readouterr().out.count(" done ") == 5
    assert main([*asked, "--seeds", "1"]) == 0
    assert capsys.readouterr().out.count(" done ") == 0, "those of seed 3 are no other seed's"
    assert main([*asked, "megatron.lr=1e-4"]) == 0
    assert capsys.readouterr().out.count(" done ") == 0, "another configuration"
    if not beside:
        collected = [word for word in asked if word != "--dry-run"] + ["--collect"]
        assert main(collected) == 0
        assert (out / "results.csv").read_text() == results.read_text()
        assert records.beside(out / "results.csv").read_text() == records.beside(results).read_text()


def test_a_folder_goes_before_the_file(tmp_path: Path) -> None:
    path, results = made(tmp_path, 5)
    ablation = definition.read(path)
    runs = ablation.runs(tmp_path / "out")
    leave(runs[0], 7.0)
    assert Results(ablation, runs, records.read(results)).losses(ablation.baseline)[3] == 7.0


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


def test_a_file_of_a_release_without_configurations_has_nothing_to_take() -> None:
    old = Path(__file__).parents[3] / "docs/ablations/bits_by_method_llama_tiny.csv"
    assert records.read(old) == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("2.0,1.0,20,4.125", "two,1.0,20,4.125", "line 2: valid_loss: 'two' is no number"),
        ("2.0,1.0,20,4.125", "2.0,1.0,20.5,4.125", "line 2: steps: '20.5' is no number"),
        ("2.0,1.0,20,4.125", "2.0,1.0,20,inf", "line 2: gradient_bits_per_element: 'inf' is no number"),
        ('"{""torch"": ""2""}"', "[2]", "line 2: versions: must be a JSON object"),
        ("cell,seed", "cell,sead", "no results.csv"),
        ("cell,seed", "\0\0", "elsewhere.csv: "),
    ],
)
def test_a_damaged_file_is_named(
    old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = made(tmp_path, 1)
    assert old in results.read_text()
    results.write_text(results.read_text().replace(old, new, 1))
    asked = ["ablate", str(path), "--out", str(tmp_path / "out"), "--results", str(results), "--dry-run"]
    assert main(asked) == 2
    assert words in capsys.readouterr().err
    assert main([*asked[:-2], str(tmp_path / "none.csv"), "--dry-run"]) == 2
    assert "none.csv: cannot be read: No such file" in capsys.readouterr().err


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_content_is_read_or_refused_in_one_line(data: st.DataObject, tmp_path_factory: object) -> None:
    columns = ["cell", "seed", "state", records.CONFIGURATION, *records.NUMBERS, "device", "versions"]
    cells = st.one_of(st.text(max_size=8), st.sampled_from(["done", "1", "nan", "-1", "{}", '{"a": [1]}']))
    rows = data.draw(st.lists(st.lists(cells, max_size=len(columns) + 2), max_size=4))
    text = io.StringIO()
    csv.writer(text).writerows([columns, *(["", "", "done", *row] for row in rows)])
    path = Path(tmp_path_factory.getbasetemp(), "any.csv")  # type: ignore[attr-defined]
    path.write_bytes(
        data.draw(st.sampled_from([b"", b"\xff", b"\0"])) + text.getvalue().encode(errors="replace")
    )
    refused, found = "", {}
    try:
        found = records.read(path)
    except UserError as error:
        refused = str(error)
    assert "\n" not in refused
    assert all(isinstance(one["versions"], dict) for one in found.values())
