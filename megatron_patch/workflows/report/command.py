"""`megatron-loco report`: runs' curves, numbers and differences on one HTML page.

RUN is a run's folder or a folder that holds runs: `megatron-loco report runs/quickstart` takes what `compare`
has left. The others are compared with the first run; below a folder it is one without compression. Runs that
differ in their seeds alone share a row and a colour. A run need not be over. The page is one file and loads
nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.files import write_whole
from megatron_patch.workflows.report.runs import read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, or of runs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/report.html"),
        metavar="FILE",
        help="the page; one that is there is replaced (default: runs/report.html)",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="show what `megatron-loco plan --out` predicted, too"
    )


def run(args: argparse.Namespace) -> int:
    """The command line's way in; returns the exit status."""
    out: Path = args.out
    if out.suffix not in (".html", ".htm") or out.is_dir():  # so that no run's file is overwritten
        raise UserError(f"--out: {out} must be a file that ends in .html")
    runs = read_runs(args.runs)
    from megatron_patch.workflows.report import planned
    from megatron_patch.workflows.report.page import render  # jinja2, matplotlib: not for --help

    page = render(runs, planned.read(args.plan) if args.plan else None)
    _write(out, page)
    print(f"{len(runs)} run{'s'[: len(runs) > 1]}: {out} ({len(page.encode()) / 1e3:,.0f} kB)")
    return 0


def _write(out: Path, page: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror}") from error
