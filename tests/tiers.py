"""Which tests `make test` leaves to `make test-all`: by folder, and by the seconds in durations.csv.

    python -m tests.tiers LOG        writes durations.csv anew

The log is that of `pytest --durations 0 -vv`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.csv"
MANY_CASES = 1.5
"""Seconds of all of a function's cases from which on `make test` runs the first case alone."""
_LEAST = 0.1
"""Seconds of a function that durations.csv lists."""

MARKED = {
    "e2e": (
        "benchmarks/network",
        "benchmarks/test_benchmarks.py",
        "with_megatron/checkpoint/test_resume.py",
        "with_megatron/test_corners.py",
        "pytorch/test_torch_scripts.py",
        "quantization/test_aarch64.py",
        "soak",
        "test_own_loop.py",
        "workflows/ablation/test_ablate.py",
        "workflows/report/test_report_browser.py",
        "workflows/run/test_restarts.py",
        "workflows/test_engine.py",
        "workflows/test_slurm_script.py",
        "workflows/test_train.py",
    ),
    "policy": ("test_docker.py", "test_docs.py", "test_forge.py", "test_site.py", "test_supply_chain.py"),
    "thorough": (
        "with_megatron/onebit_adam/test_onebit_parallelism.py",
        "with_megatron/seams/test_bad_gradients.py",
        "with_megatron/test_numerics.py",
        "order",
        "ptx",
        "weights/test_weight_code.py",
    ),
}


def mark_of(file: str) -> str | None:
    """The mark of a test file, named from this folder."""
    return next((mark for mark, paths in MARKED.items() if file.startswith(paths)), None)


def with_many_cases() -> set[str]:
    """`file::function` of those of which `make test` runs one case."""
    with DURATIONS.open(encoding="utf-8", newline="") as file:
        return {
            row["test"]
            for row in csv.DictReader(file)
            if int(row["cases"]) > 1 and float(row["seconds"]) >= MANY_CASES
        }


def read(lines: Iterable[str]) -> dict[str, tuple[int, float]]:
    """(cases, seconds) of every function, of what pytest printed."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if match := re.match(
            r"\s*([\d.]+)s (?:call|setup|teardown)\s+tests/(\S+?::\w+)(\[.*)?$", line.rstrip()
        ):
            seconds, function, case = match.groups()
            cases = found.setdefault(function, {})
            cases[case or ""] = cases.get(case or "", 0) + float(seconds)
    return {function: (len(cases), sum(cases.values())) for function, cases in found.items()}


def main(log: Path) -> None:
    found = read(log.read_text(encoding="utf-8", errors="replace").splitlines())
    with DURATIONS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["test", "cases", "seconds"])
        for function, (cases, seconds) in sorted(found.items()):
            if seconds >= _LEAST:
                writer.writerow([function, cases, f"{seconds:.1f}"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
