"""`megatron-loco compare`: runs a configuration with several methods, one after another, and compares them.

Below the folder: one run per method, comparison.json (all numbers), comparison.md (the table) and
comparison.png (loss curves, their differences, bytes on the wire). The first method named is the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_patch.errors import UserError
from megatron_patch.files import write_whole
from megatron_patch.workflows import plots, tables, train
from megatron_patch.workflows.run import configuration, launcher, run_folder
from megatron_patch.workflows.run.prepare import PreparedRun, prepare_run
from megatron_patch.workflows.run.run_folder import State
from megatron_patch.workflows.run_reader import read_records, read_summary

_COLUMNS = (
    *("method", "valid. loss", "difference", "step (s)", "bits/gradient", "bits/weight"),
    *("gradient MB/step", "weight MB/step", "error state MB"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco compare`."""
    train.add_run_arguments(parser).add_argument(
        "--resume", action="store_true", help="resume a comparison that was interrupted"
    )
    parser.add_argument(
        "--methods", default="none,loco", metavar="A,B", help="names in configs/methods, the baseline first"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    path = configuration.find(args.config)
    names = [name.strip() for name in args.methods.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise UserError(f"methods: {args.methods!r} must be different names, separated by commas")
    chosen = {name: configuration.method_recipe(name) for name in names}
    out, asked = args.out or Path("runs") / path.stem, train.overrides(args)
    runs = {
        name: configuration.load(path, asked, and_files=[recipe], for_several=True, importing=True)
        for name, recipe in chosen.items()
    }
    run_folder.refuse_shared(runs.values())
    for name, run_config in runs.items():
        if args.resume:
            run_folder.check_unchanged(out / name, run_config)
        else:
            run_folder.check_folder(out / name, run_folder.place(run_config, out / name), args.overwrite)
    prepared = {name: prepare_run(run_config, out / name) for name, run_config in runs.items()}
    width = max(map(len, names))
    try:
        summaries = {name: _summary(each, name.ljust(width), args) for name, each in prepared.items()}
    except (KeyboardInterrupt, launcher.Stopped):
        instead = " in place of --overwrite" if args.overwrite else ""
        print(f"the same command with --resume{instead} resumes this one", file=sys.stderr)
        raise
    write_comparison(out, summaries)
    return 0


def _summary(prepared: PreparedRun, label: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the run, or resume it unless it is complete, and return its summary."""
    if not args.resume:
        return train.execute(prepared, label, args.overwrite)
    if run_folder.look(prepared.folder, prepared.run) is State.DONE:
        return read_summary(prepared.folder)
    return train.resume_or_start(prepared, label)


def write_comparison(out: Path, summaries: dict[str, dict[str, Any]]) -> None:
    """Write comparison.json, .md and .png below `out`, and print the table."""
    baseline = next(iter(summaries))
    base = summaries[baseline]["valid_loss"]
    losses = {name: summary["valid_loss"] for name, summary in summaries.items()}
    differences = {
        name: None if base is None or loss is None else 100 * (loss - base) / base
        for name, loss in losses.items()
    }
    content = {"baseline": baseline, "valid_loss_difference_percent": differences, "runs": summaries}
    write_whole(out / "comparison.json", json.dumps(content, indent=2) + "\n")
    rows = [
        _row(name, summary, None if name == baseline else differences[name])
        for name, summary in summaries.items()
    ]
    write_whole(out / "comparison.md", _markdown(rows, summaries[baseline]))
    plots.draw_comparison(
        out / "comparison.png", {name: read_records(out / name) for name in summaries}, summaries
    )
    # A log or a pipe has no width, and the table must not be folded to 80 columns there.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print()
    console.print(tables.terminal(_COLUMNS, rows, left=("method",)))
    console.print(f"\n{out / 'comparison.md'}  {out / 'comparison.png'}", highlight=False)


def _row(name: str, summary: dict[str, Any], difference: float | None) -> tuple[str, ...]:
    loss, wires = summary["valid_loss"], [summary["gradient_wire"], summary["weight_wire"]]
    return (
        name,
        "-" if loss is None else f"{loss:.4f}",
        "-" if difference is None else f"{difference:+.2f} %",
        f"{summary['step_seconds']['median']:.3f}",
        *(f"{wire['bits_per_element']:.2f}" for wire in wires),
        *(f"{wire['bytes_per_step'] / 1e6:.2f}" for wire in wires),
        f"{summary['compensation_bytes'] / 1e6:.2f}",
    )


def _markdown(rows: list[tuple[str, ...]], summary: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return (
        f"{tables.markdown(_COLUMNS, rows)}\n\n"
        f"{summary['world_size']} ranks, {summary['steps']} steps, {summary['device']}; {versions}."
        " Bytes are payload sent by one rank, those of weights the mean of the steps that were logged; error"
        " state is per rank, step time is the median.\n"
    )
