"""A difference that a page claims is that of two cells in a results file; a relative link resolves."""

from __future__ import annotations

import csv
import itertools
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.error_feedback import loss_table
from benchmarks.planner import command
from megatron_patch.workflows.ablation import records
from megatron_patch.workflows.ablation.statistics import Interval, interval, over_steps, percent

ROOT = Path(__file__).parents[1]
NUMBER = r"([+-]\d+\.\d\d)"
CLAIM = re.compile(rf"{NUMBER}(?: %)?,? \(?{NUMBER} to {NUMBER}(?:\)( \*\*0\*\*)?)?")
"""`+0.17 % (+0.06 to +0.29)`, `(+0.53 %, -0.08 to +1.13)`; in a table `-0.04 (-0.10 to +0.02) **0**`."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def measured(path: Path) -> set[tuple[str, ...]]:
    """Mean and bounds as written, and the verdict, of every cell against every other in a results.csv.

    Of runs that take hours a file may have some only, and a page says nothing of pairs with too few of them.
    """
    losses: dict[str, dict[int, float]] = {}
    steps = set()
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if path.stem.startswith("long_") and row["state"] != "done":
                continue
            assert row["state"] == "done", f"{path.name}: {row['cell']}, seed {row['seed']}"
            losses.setdefault(row["cell"], {})[int(row["seed"])] = float(row["valid_loss"])
            steps.add(int(row["steps"]))
    long = min(steps) >= 1000
    seeds = 3 if long else 5  # pairs of long runs differ less
    found = set()
    for first, second in itertools.permutations(losses.values(), 2):
        if long and len(first.keys() & second.keys()) < seeds:
            continue
        assert len(first) >= seeds
        assert first.keys() == second.keys()
        found.add(written(interval(list(percent(first, second).values()))))
    return found


def written(one: Interval | None) -> tuple[str, ...]:
    """As a page has it, and the verdict."""
    assert one is not None
    return *(f"{value:+.2f}" for value in (one.mean, one.low, one.high)), one.verdict


def measured_at_length(path: Path) -> set[tuple[str, ...]]:
    """The same of long runs' test sets, and of what became of the training loss, of cells with 3 pairs."""
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "done" and row.get("test_loss")]
    if not rows:
        return set()
    points = records.read_curves(records.beside(path))
    tested: dict[str, dict[int, float]] = {}
    trained: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        tested.setdefault(row["cell"], {})[int(row["seed"])] = float(row["test_loss"])
        losses = records.losses(points[row["configuration"]])
        trained.setdefault(row["cell"], {})[int(row["seed"])] = losses
    baseline = rows[0]["cell"]
    found = set()
    for cell, losses in tested.items():
        pairs = percent(losses, tested[baseline])
        if cell == baseline or len(pairs) < 3:
            continue
        steps = over_steps({s: percent(trained[cell][s], trained[baseline][s]) for s in pairs})
        assert steps is not None
        found |= set(map(written, (interval(list(pairs.values())), steps.last, steps.doubling)))
    return found


@pytest.mark.parametrize(
    "page",
    ["docs/ablations.md", "docs/alternatives.md", "docs/benchmarks.md", "docs/onebit_adam.md", "README.md"],
)
def test_differences_are_those_of_the_results(page: str) -> None:
    files = [path for path in (ROOT / "docs/ablations").glob("*.csv") if not path.stem.endswith("_curves")]
    long = [path for path in files if records.beside(path).exists()]
    known = set().union(*map(measured, files), *map(measured_at_length, long))
    claims = 0
    for line in (ROOT / page).read_text(encoding="utf-8").replace("\n  ", " ").splitlines():
        for *numbers, mark in CLAIM.findall(line):
            claims += 1
            verdicts = {verdict for *found, verdict in known if found == numbers}
            assert verdicts, f"{numbers} is no difference in docs/ablations/*.csv"
            if line.startswith("|"):
                assert any((verdict == "contains zero") == bool(mark) for verdict in verdicts), line
    assert claims


def test_what_2_bits_and_other_rates_change_is_that_of_the_results() -> None:
    """The rows of the page's table, and the share of the first one that both codes change."""
    page = (ROOT / "docs/ablations.md").read_text(encoding="utf-8")
    with (ROOT / "docs/ablations/long_fine_tuning_rates_llama_3m.csv").open(encoding="utf-8") as file:
        losses = [
            [float(row[kind]) for kind in ("valid_loss", "train_loss", "test_loss")]
            for row in csv.DictReader(file)
        ]
    loco, naive, higher, loco_lower, naive_higher = (
        [100 * (one / other - 1) for one, other in zip(row, losses[0], strict=True)] for row in losses[1:]
    )
    table = page[page.index("| uncompressed, 1.1 times the rate |") :].splitlines()
    for line, row in zip(table, (higher, loco, loco_lower, naive, naive_higher), strict=False):
        assert line.endswith(f"| {row[0]:+.2f} | {row[1]:+.2f} | {row[2]:+.2f} |")
    shares = [f"{one / other:.2f}" for row in (loco, naive) for one, other in zip(row, higher, strict=True)]
    assert "they change {}, {} and {}, and {}, {} and {}, of what".format(*shares) in page.replace("\n ", "")


def test_what_another_rate_changes_over_3000_steps_is_that_of_the_results() -> None:
    page = (ROOT / "docs/ablations.md").read_text(encoding="utf-8").replace("\n ", "")
    path = ROOT / "docs/ablations/long_rate_of_two_bits_llama_3m.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points = records.read_curves(records.beside(path))
    losses = [records.losses(points[row["configuration"]]) for row in rows]
    said = []
    for row, trained in zip(rows[1:], losses[1:], strict=True):
        steps = over_steps({1: percent(trained, losses[0])})
        assert steps is not None
        valid = 100 * (float(row["valid_loss"]) / float(rows[0]["valid_loss"]) - 1)
        said.append(f"{abs(valid):.2f} {abs(steps.last.mean):.2f}")
    sentence = page[page.index("- **Over 3,000 steps** from random weights") :].split("\n- ")[0]
    figures = re.findall(r"(\d\.\d\d) (?:% lower, training loss|and) (\d\.\d\d) %", sentence)
    assert {" ".join(one) for one in figures} == set(said)


def test_the_loss_tables_are_those_of_the_results() -> None:
    chosen = [row for row in loss_table.ROWS if row.readme]
    for page, rows in (("README.md", chosen), ("docs/benchmarks.md", loss_table.ROWS)):
        assert loss_table.table(rows) in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_line_over_sizes_is_that_of_the_results() -> None:
    page = (ROOT / "docs/ablations.md").read_text(encoding="utf-8")
    command = re.search(r"python (benchmarks/error_feedback/trend_over_sizes.py(?:.*\\\n)*.*)", page)
    assert command is not None
    shown = subprocess.run(
        [sys.executable, *command[1].replace("\\\n", " ").split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    doubling, there = (
        [float(one) for one in re.findall(r"[+-]\d+\.\d+", line)] for line in shown.splitlines()[-2:]
    )
    said = [
        "{:+.2f} percentage points per doubling of the parameters ({:+.2f} to {:+.2f})".format(*doubling),
        f"{-there[1]:.2f} % below uncompressed to {there[2]:.2f} % above",
    ]
    assert all(one in page.replace("\n", " ") for one in said), shown


def prose(page: Path) -> list[str]:
    """The lines of a page, without blocks of code."""
    pieces = page.read_text(encoding="utf-8").split("```")
    return [line for piece in pieces[::2] for line in piece.splitlines() if not line.startswith("    ")]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page: lower case, hyphens for spaces, no punctuation."""
    found: dict[str, int] = {}
    for line in prose(page):
        if heading := re.match(r"#+ (.*)", line):
            name = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            found[name] = found.get(name, -1) + 1
    return {f"{name}-{i}" if i else name for name, times in found.items() for i in range(times + 1)}


def test_relative_links_point_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", "\n".join(prose(page)))):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            there = target.exists() and (not anchor or anchor in anchors(target))
            if not there and not re.match(r"[a-z]+:", link):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_pages_name_source_files_that_are_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = tuple(f"/{name}" for name in listed.split())
    pages = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]
    named = [
        (page.name, name)
        for page in pages
        for name in re.findall(r"`([\w./-]+\.(?:py|cpp|h|sh))`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 100
    assert [one for one in named if not any(file.endswith(f"/{one[1]}") for file in there)] == []


def repeated() -> str:
    """What pages say of repeated measurements."""
    with (ROOT / "docs/plan/network.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["rate_mbit"]]
    found = [abs(float(row["step_seconds"]) / float(row["unshaped_step_seconds"]) - 1) for row in rows]
    return f"{statistics.median(found):.0%} in the median and {max(found):.0%} at worst"


SPEEDS = ROOT / "docs/benchmarks/slow_links.csv"


def speeds(*tables: Path) -> dict[tuple[int, str, str, str], float]:
    """Seconds of a step by hosts, method, rate and microbatches."""
    found = {}
    for table in tables or (ROOT / "docs/plan/network.csv", SPEEDS):
        with table.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name, hosts = row.get("name") or row["method"], int(row.get("hosts") or 4)
                found[hosts, name, row["rate_mbit"], row["accumulation"]] = float(row["step_seconds"])
    return found


def speedups(found: dict[tuple[int, str, str, str], float], hosts: int, method: str, *place: str) -> str:
    return f"{found[hosts, 'bf16_alltoall', *place] / found[hosts, method, *place]:.2f} x"


def test_the_readmes_speed_ups_are_those_of_the_measured_steps() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = speeds()
    rows = re.findall(r"^\| (\d+ Mbit/s|no limit) \| (\d) \| (.*) \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    for link, count, cells in rows:
        rate = "" if link == "no limit" else link.split()[0]
        shown = cells.replace("*", "").split(" | ")
        assert shown == [
            speedups(found, 4, name, rate, count) for name in ("loco4", "loco4_exact", "loco2_exact")
        ]


def test_the_benchmarks_speed_ups_are_those_of_the_measured_steps() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    found = speeds()
    with SPEEDS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = "method accumulation rate_mbit step_seconds exchange_seconds gradient_mb weight_mb weight_bits"
    for row in rows:
        cells = [row[name] or "no limit" for name in (*names.split(), "interface_mb")]
        ratio = speedups(found, 4, row["method"], row["rate_mbit"], row["accumulation"])
        by_bytes = f"{row['speedup_by_bytes']} x" if row["speedup_by_bytes"] else "-"
        assert f"| {' | '.join(cells)} | {ratio} | {by_bytes} |" in page
    gains = [
        100 * (found[4, "loco4_exact", rate, "1"] / found[4, "loco2_exact", rate, "1"] - 1)
        for rate in ("25", "100", "1000")
    ]
    said = "{:.0f} % faster than with 4 bits at 25 Mbit/s, {:.0f} % at 100, and not at all at"
    assert said.format(*gains) in page
    assert round(gains[2]) <= 0
    others = speeds(ROOT / "docs/plan/network.csv")
    shown = re.findall(r"^\| (\d) x (\d) \| (\w+) \| (\d) \| (.*) \|$", page, re.MULTILINE)
    assert len(shown) == 10
    for hosts, _, name, count, cells in shown:
        rates = ("100", "200", "300", "1000", "")
        assert cells.split(" | ") == [speedups(others, int(hosts), name, rate, count) for rate in rates]
    assert repeated() in page


def test_the_weight_gathers_speed_ups_are_those_of_the_benchmarks() -> None:
    page = " ".join((ROOT / "docs/weight_gather.md").read_text(encoding="utf-8").split())
    found = speeds()
    for rate in ("25", "100", "300", "1000"):
        pair = [speedups(found, 4, name, rate, "1").split()[0] for name in ("loco4", "loco4_exact")]
        assert "from {} to {}".format(*pair) in page
    most, least = (speedups(found, 4, "loco4_exact", rate, "1").split()[0] for rate in ("25", "1000"))
    assert f"step {least} to {most} times" in (ROOT / "docs/alternatives.md").read_text(encoding="utf-8")


def test_the_readmes_predictions_are_the_planners() -> None:
    """They are those of docs/plan.md's table of jobs, which a slow test predicts again."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    jobs = re.findall(
        r"\| `(\w+)\.yaml [^`]*--inter-gbit (\d+)` \| 2 x 8 \| (\d+) \|(?: [^|]*\|){3}"
        r" (\d+\.\d\d x) \| (\d+\.\d\d x) \|",
        page,
    )
    cells = 2 * r" \| (\d+\.\d\d x)"
    rows = re.findall(rf"^\| `(\w+)`, .* \| (\d+) Gbit/s \| (\d+){cells}", readme, re.MULTILINE)
    assert len(rows) == 5
    assert set(rows) <= set(jobs)


def test_the_table_of_options_is_that_of_the_configuration() -> None:
    options = runpy.run_path(str(ROOT / "tools/options.py"))
    text = options["PAGE"].read_text(encoding="utf-8")
    assert options["page"](text) == text, "python tools/options.py"


def test_the_readme_says_how_good_the_planner_is() -> None:
    """Where links take the time the predictions are closest; the processor's noise is elsewhere."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    cells = command.read(ROOT / "docs/plan/network.csv", ROOT / "docs/plan/calibration.yaml")
    cells = [c for c in cells if not c.cell.given]
    steps = [abs(c.error) for c in cells]
    ratios = [abs(c.ratio_error) for c in cells if c.ratio_error is not None]
    assert f"Against {len(cells)} measured cells" in readme
    assert f"off by {statistics.median(steps):.1%} in the median and by {max(steps):.1%} at worst" in readme
    assert f"its speed-ups by {statistics.median(ratios):.1%} and {max(ratios):.1%}" in readme
    assert repeated() in readme
    slow = [c for c in cells if c.cell.rate_mbit is not None and c.cell.rate_mbit <= 300]
    assert statistics.median(abs(c.error) for c in slow) < 0.05
    assert max(steps) < 0.20
    assert statistics.median(steps) < 0.10
