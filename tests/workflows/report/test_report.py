"""`megatron-loco report`: what its page says of runs that are over, under way, broken, alike and many."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import VERSIONS, write_run

from megatron_patch.megatron.seams.traffic import RAW_REASONS
from megatron_patch.workflows import cli
from megatron_patch.workflows.report import figures, table
from megatron_patch.workflows.report.table import group_runs, run_names
from megatron_patch.workflows.run_reader import read_runs

OF_ALL_RUNS = [quantity for quantity in figures.QUANTITIES if not quantity.of_exact_gather]


@pytest.fixture(autouse=True)
def one_figure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests look at one figure, the loss: drawing takes most of their time."""
    if "all_figures" not in request.fixturenames:
        monkeypatch.setattr(figures, "QUANTITIES", figures.QUANTITIES[:1])


@pytest.fixture
def all_figures() -> None:
    """Asked for by tests that look at the others too."""


class Page(HTMLParser):
    """A page's tables (lists of rows of texts), its text, and the tags and attributes that it is made of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._style = self._cell = False
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._style = tag == "style"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True
        elif tag == "span" and self._cell:
            self.tables[-1][-1][-1] += "|"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False
            self.tables[-1][-1][-1] = self.tables[-1][-1][-1].strip()
        self._style = False

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def labels(self) -> dict[str, str]:
        """Title of a picture -> what a reader is told who does not see it."""
        told = [value for name, value in self.attributes if name == "aria-label" and ", against the" in value]
        return {label.partition(",")[0]: label for label in told}

    def lines(self, title: str) -> set[str]:
        """The curves' styles in the picture of this title, as CSS colours."""
        begin = self.source.index(f'aria-label="{title},')
        picture = self.source[begin : self.source.index("</svg>", begin)]
        return set(re.findall(r"var\(--curve-\d\)", picture))


def report(tmp_path: Path, *folders: Path) -> Page:
    out = tmp_path / "out" / "page.html"
    assert cli.main(["report", *map(str, folders), "--out", str(out)]) == 0
    return Page(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["report", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-loco: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("megatron-loco: error: ").strip()


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], all_figures: None) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "loco", valid_loss=2.01)
    write_run(runs / "none", "none")
    (runs / "comparison.json").write_text("{}")  # compare's own files are no run
    page = report(tmp_path, runs)
    heads, first, second = page.tables[0]
    assert heads[:3] == ["run", "validation loss", "against the first"]  # what a narrow screen shows first
    assert [first[0], *first[-3:]] == ["none", "none", "–", "100"]  # uncompressed first: the others' baseline
    row = dict(zip(heads, second, strict=True))
    assert (row["run"], row["method"], row["bits"], row["steps"]) == ("loco", "loco", "4", "100")
    assert row["validation loss"] == "2.0100"
    assert row["against the first"] == "+0.50 %"
    assert row["step time (s)"] == "0.260"
    assert row["bits per gradient element"] == "4.00"
    assert row["gradient MB per step"] == "0.175"
    assert row["weight MB per step"] == "1.40"
    assert row["error state MB"] == "0.483"
    assert row["tokens per second"] == "15,837"
    assert page.tables[1] == [["key", "none", "loco"], ["compression.method", "none", "loco"]]
    labels = page.labels()
    assert set(labels) == {quantity.title for quantity in OF_ALL_RUNS}
    assert "none: 0.260; loco: 0.260" in labels["Step time"]
    assert "none: 1.40; loco: 0.175" in labels["Gradient bytes on the wire"]
    assert "Medians: loco: 16.0" in labels["Signal-to-noise ratio of compression"]  # null in the other run
    assert page.lines("Training loss") == {"var(--curve-0)", "var(--curve-1)"}
    assert page.lines("Norm of the remembered error") == {"var(--curve-1)"}
    assert "4 ranks, cpu (x86_64); python 3.12.1, megatron-loco 0.1.0" in page.text
    for absent in ("weight gather", "bits per weight", "No curve of", "cannot be compared"):
        assert absent not in page.text
    assert re.search(r"^2 runs: .*page\.html \(\d+ kB\)$", capsys.readouterr().out.strip())

    # The order of runs that are named is the user's.
    rows = report(tmp_path, runs / "loco", runs / "none").tables[0]
    assert [row[0] for row in rows[1:]] == ["loco", "none"]


def test_exact_weight_gathers(tmp_path: Path, all_figures: None) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "a_none", "none")
    write_run(runs / "b_begun", logged=4, finished=False, exact={"copies_differ": 2, "of another release": 1})
    write_run(runs / "c_loco", exact={"forced": 12, "inside_step": 1_300})
    page = report(tmp_path, runs)
    heads, none, begun, loco = page.tables[0]
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in (none, begun, loco)}
    found = [(row["bits per weight"], row["weight MB per step"]) for row in rows.values()]
    assert found == [("32.00", "1.40"), ("4.50", "0.197"), ("4.10", "0.179")]  # means of the logged steps
    assert [row["weight gather MB"] for row in rows.values()] == ["–", "–", "0.255"]
    labels = page.labels()
    assert "a_none: 32.0; b_begun: 4.50; c_loco: 4.10" in labels["Bits per weight on the wire"]
    assert "Medians: b_begun: 4.00; c_loco: 3.60" in labels["Bits per weight of the messages"]
    assert "c_loco: 43.8 %" in labels["Unchanged weights"]
    assert page.tables[1] == [
        ["gathered in full", "b_begun", "c_loco"],
        ["forced, by an evaluation or a checkpoint", "0", "12"],
        ["dispatched inside the optimizer's step", "0", "1,300"],
        ["ranks' copies differed", "2", "0"],
        ["of another release", "1", "0"],
    ]
    assert "No curve of" not in page.text


def test_every_reason_of_a_gather_in_full_has_words() -> None:
    assert list(table.RAW_GATHERS) == list(RAW_REASONS)


def test_the_page_is_one_file_that_names_no_other(tmp_path: Path, all_figures: None) -> None:
    """A browser's look at it is in test_report_browser.py, where there is one."""
    page = report(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", bits=2))
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base", "image"}
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            assert value.startswith("#"), (name, value)
    assert "@import" not in page.source
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    identifiers = [value for name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    used = re.findall(r"url\(([^)]*)\)", page.source)
    assert len(set(used)) == len(OF_ALL_RUNS)  # each picture its own clipping
    assert {name.removeprefix("#") for name in used} <= set(identifiers)


def test_texts_of_runs_are_escaped(tmp_path: Path) -> None:
    name = """<b onload="x">&"'{{ 7 * 7 }}"""
    evil = "<script>alert(1)</script>"
    run = write_run(tmp_path / name, config={"megatron.x": evil}, summary={"device": evil})
    write_run(tmp_path / "other")
    failed = write_run(tmp_path / "failed", finished=False)
    (failed / "failures").mkdir()
    (failed / "failures" / "rank-0.json").write_text(json.dumps({"time": 1, "error": evil}))
    page = report(tmp_path, run, tmp_path / "other", failed)
    assert "script" not in page.tags
    assert "b" not in page.tags or "onload" not in dict(page.attributes)
    assert page.tables[0][1][0] == name
    assert page.text.count(evil) >= 4  # differences, configuration, failure, device
    assert name in page.labels()["Training loss"]


def test_runs_that_have_not_come_to_an_end(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "a_whole", "none")
    torn = write_run(runs / "b_torn", logged=8, finished=False)
    with (torn / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 45, "lo')
    failed = write_run(runs / "c_failed", logged=2, finished=False)
    (failed / "failures").mkdir()
    for rank, moment in ((0, 5.0), (1, 4.0)):
        record = {"rank": rank, "time": moment, "error": f"ValueError: of rank {rank}\nmore"}
        (failed / "failures" / f"rank-{rank}.json").write_text(json.dumps(record))
    empty = write_run(runs / "d_begun", finished=False)
    (empty / "metrics.jsonl").unlink()
    write_run(runs / "e_stopped", logged=10)
    page = report(tmp_path, runs)
    heads, *rows = page.tables[0]
    assert [(row[0], row[heads.index("steps")]) for row in rows] == [
        ("a_whole", "100"),
        ("b_torn|unfinished", "40 of 100"),
        ("c_failed|failed", "10 of 100"),
        ("d_begun|unfinished", "0 of 100"),
        ("e_stopped|stopped", "50 of 100"),
    ]
    row = dict(zip(heads, rows[1], strict=True))
    assert (row["method"], row["bits"], row["gradient MB per step"]) == ("loco", "4", "0.175")
    assert row["validation loss"] == row["error state MB"] == rows[3][heads.index("training loss")] == "–"
    assert "c_failed: failed after 10 of 100 steps: ValueError: of rank 1\n" in page.text  # the earliest
    assert "b_torn: unfinished after 40 of 100 steps: still running, or killed" in page.text
    assert len(page.lines("Training loss")) == 4  # all but the one without a step
    assert "no run here has logged a value" in report(tmp_path, empty).text


def test_a_run_started_without_a_configuration(tmp_path: Path) -> None:
    """`python -m megatron_patch.launch ... --compression-output DIR` leaves metrics and a summary."""
    run = write_run(tmp_path / "script")
    for name in ("config.yaml", "command.txt"):
        (run / name).unlink()
    page = report(tmp_path, run, write_run(tmp_path / "other", bits=2), write_run(tmp_path / "third", bits=8))
    row = page.tables[0][1]
    assert [row[0], *row[-3:]] == ["script", "loco", "4", "100"]
    assert ["compression.bits", "not recorded", "2", "8"] in page.tables[1]


def test_values_that_are_no_numbers_and_slow_steps(tmp_path: Path, all_figures: None) -> None:
    losses = {"train_loss": float("nan"), "valid_loss": None}
    run = write_run(tmp_path / "diverged", logged=40, planned=200, summary=losses)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records[0]["step_seconds"] = 30.0
    records[1]["loss"] = None
    records[2] = {"step": 15}
    for record in records[30:]:
        record |= {"loss": float("inf"), "compression_snr_db": float("nan")}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = report(tmp_path, run, write_run(tmp_path / "none", "none"))
    row = dict(zip(*page.tables[0][:2], strict=True))
    shown = ("training loss", "validation loss", "against the first")
    assert [row[loss] for loss in shown] == ["nan", "–", "–"]
    assert "diverged: nan" in page.labels()["Training loss"]
    assert "diverged: 16.0" in page.labels()["Signal-to-noise ratio of compression"]
    assert "NaN" not in page.source.partition("</style>")[2]  # no coordinate is
    assert re.search(r"1 of \d+ points lie above the axis, up to 30\.0\.", page.text)


def test_seeds_are_one_configuration_and_paired(tmp_path: Path) -> None:
    losses = {1: (2.0, 2.02), 2: (2.2, 2.2), 10: (2.4, 2.424)}
    for seed, (none, loco) in losses.items():
        write_run(tmp_path / "runs" / f"seed-{seed}" / "none", "none", seed=seed, valid_loss=none)
        write_run(tmp_path / "runs" / f"seed-{seed}" / "loco", seed=seed, valid_loss=loco)
    page = report(tmp_path, tmp_path / "runs")
    heads, none_row, loco_row = page.tables[0]
    assert [none_row[0], loco_row[0]] == ["none|3 runs", "loco|3 runs"]
    assert loco_row[heads.index("validation loss")] == "2.2147 ± 0.2024"
    # +1, 0 and +1 %, run against run; mean against mean would be +0.67 % without a spread.
    assert loco_row[heads.index("against the first")] == "+0.67 ± 0.58 %"
    singles = [row[0] for row in page.tables[1][1:]]
    assert singles == [f"seed-{seed}/{name}" for name in ("none", "loco") for seed in (1, 2, 10)]
    assert ["megatron.seed", "1, 2, 10", "1, 2, 10"] in page.tables[2]
    assert page.lines("Training loss") == {"var(--curve-0)", "var(--curve-1)"}

    # Means are of the runs that came to their end.
    write_run(tmp_path / "x" / "seed-1", valid_loss=2.0)
    write_run(tmp_path / "x" / "seed-2", seed=2, logged=2, finished=False)
    page = report(tmp_path, tmp_path / "x")
    heads, row = page.tables[0]
    assert row[0] == "x|2 runs, 1 of them not finished"
    assert row[heads.index("steps")] == "10 to 100 of 100"
    whole = page.tables[1][1]
    assert row[heads.index("training loss")] == whole[heads.index("training loss")]


def test_many_configurations(tmp_path: Path) -> None:
    """An ablation: 32 configurations, two seeds each."""
    for bits in (8, 4, 2, 1):
        for block in range(8):
            for seed in (1, 2):
                folder = tmp_path / "runs" / f"bits={bits},block={block}" / f"seed-{seed}"
                settings = {"compression.block_size": block}
                write_run(folder, bits=bits, seed=seed, logged=5, planned=25, config=settings)
    page = report(tmp_path, tmp_path / "runs")
    heads, *rows = page.tables[0]
    assert heads[0] == "configuration"
    assert len(rows) == 32
    assert rows[0][0] == "bits=1,block=0|2 runs"
    assert "64 runs of 32 configurations" in page.text
    assert "first 28 of 32 configurations" in page.text
    samples = re.findall(r'<path d="M1 4H29" style="([^"]*)" stroke-dasharray="([^"]*)"', page.source)
    assert len(set(samples)) == 28  # no two look alike
    assert page.source.count('class="key-27"') == len(figures.QUANTITIES)
    assert 'class="key-28"' not in page.source
    transposed = page.tables[2]
    assert transposed[0] == ["configuration", "megatron.seed", "compression.bits", "compression.block_size"]
    assert transposed[-1] == ["bits=8,block=7", "1, 2", "8", "7"]


def test_equal_runs_are_not_taken_for_seeds(tmp_path: Path) -> None:
    for when in ("before", "after"):
        for seed in (1, 2):
            write_run(tmp_path / when / f"seed-{seed}", seed=seed)
    runs = read_runs([tmp_path / "before", tmp_path / "after"])
    names = [group.name for group in group_runs(runs)]
    assert names == ["before/seed-1", "before/seed-2", "after/seed-1", "after/seed-2"]


def test_names_are_the_shortest_that_tell_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "x" / "none", "none")
    second = write_run(tmp_path / "b" / "x" / "none", "none")
    assert run_names(read_runs([first])) == ["none"]
    assert run_names(read_runs([first, second])) == ["a", "b"]
    other = write_run(tmp_path / "b" / "x" / "loco")
    assert run_names(read_runs([first, second, other])) == ["a/x/none", "b/x/none", "b/x/loco"]
    assert run_names(read_runs([second, other])) == ["none", "loco"]


def test_runs_that_were_made_or_trained_differently(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", seed=3)
    versions = {**VERSIONS, "torch": "2.16.0"}
    on_gpus = {"world_size": 8, "device": "NVIDIA H100", "versions": versions}
    write_run(tmp_path / "b", config={"megatron.lr": 0.1}, summary=on_gpus)
    page = report(tmp_path, tmp_path / "a", tmp_path / "b")
    differ = "differ in more than compression (megatron.lr): differences of their losses have other"
    assert differ in page.text
    assert "different devices and numbers of ranks and versions" in page.text
    assert "step times and tokens per second cannot be compared" in page.text
    assert (
        "8 ranks, NVIDIA H100; python 3.12.1, megatron-loco 0.1.0, megatron-core 0.19.2, torch" in page.text
    )
    alike = report(tmp_path, tmp_path / "a", write_run(tmp_path / "c", seed=3))
    assert "more than compression" not in alike.text


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    long = report(tmp_path, write_run(tmp_path / "long", logged=2_500, planned=12_500))
    assert re.search(r"up to \d neighbouring logged steps are drawn as their mean", long.text)
    steps, values = figures._thinned({step: float(step) for step in range(1, 20_001)})
    assert len(steps) <= figures.MOST_POINTS
    assert list(steps) == list(values)  # means of the same points, the short last piece's too


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    out = tmp_path / "page.html"
    assert refused(capsys, tmp_path / "nowhere", "--out", out) == f"{tmp_path / 'nowhere'}: no such folder"
    assert refused(capsys, run / "metrics.jsonl", "--out", out).endswith(f"name the run's folder, e.g. {run}")
    (tmp_path / "empty").mkdir()
    told = refused(capsys, tmp_path / "empty", "--out", out)
    assert all(words in told for words in ("holds no run", "metrics.jsonl", "--out DIR"))
    assert refused(capsys, run, "--out", run / "metrics.jsonl").endswith("must be a file that ends in .html")
    (run / "metrics.jsonl").write_text('{"step": 5}\n{"step": 1\n{"step": 15}\n')
    told = refused(capsys, run, "--out", out)
    assert told.startswith(f"{run / 'metrics.jsonl'}: line 2 is no JSON")
    assert "leave the run out" in told
    assert not out.exists()


def test_a_full_disk_leaves_the_page_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "somewhere" / "run")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "somewhere"]) == 0
    out = tmp_path / "runs" / "report.html"
    whole = out.read_text()
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        assert (target, target.read_text()) == (out.relative_to(tmp_path), whole), "until it is written"
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    assert cli.main(["report", str(run)]) == 2
    monkeypatch.setattr(Path, "replace", replace)
    assert out.read_text() == whole
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]  # nothing partial stays
