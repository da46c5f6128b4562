"""`megatron-loco ablate`: a grid or list of settings, over several seeds, from a base recipe.

Below the folder: DIR/CELL/seed-N/ is one run as `train` leaves it; results.csv has a line per run,
ablation.md a line per cell (mean, spread, difference to the baseline's run of the same seed with its 95 %
interval), results_curves.csv a line per run and logged step; differences.png and curves.png are the pictures.
The three tables are written anew after every run.

The same command continues where it was interrupted, by Ctrl-C too: runs that are done, or have failed, are
not made again. Where their folders are gone, those that results.csv has of the same configuration count as
done; --results FILE takes them, and the curves beside it, from another machine. A run that fails is reported
and the rest continues; --retry-failed gives it another chance. On the CPU of one machine every run is forked
from this process, which has imported Megatron already.

A Slurm array makes one run per task: pretrain_scripts/slurm/ablate.sbatch; --collect then writes the results.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_patch.errors import RankFailed, UserError
from megatron_patch.files import check_output, write_whole
from megatron_patch.workflows import plots, train
from megatron_patch.workflows.ablation import definition, records
from megatron_patch.workflows.ablation.definition import Ablation, Run
from megatron_patch.workflows.ablation.results import Results, read_outcome
from megatron_patch.workflows.run import launcher, progress, run_folder
from megatron_patch.workflows.run.prepare import prepare_run
from megatron_patch.workflows.run.run_folder import State, only_one

Known = tuple[records.Summaries, records.Curves]
"""Results of runs that are known from results.csv and results_curves.csv, and not from their folders."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco ablate`."""
    parser.add_argument(
        "config", metavar="CONFIG", help="e.g. configs/ablations/bits_by_method.yaml, or just bits_by_method"
    )
    train.add_overrides(parser, "for all runs")
    parser.add_argument("--base", metavar="RECIPE", help="another base, e.g. configs/models/moe_tiny.yaml")
    parser.add_argument("--seeds", metavar="A,B", help="other seeds")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/ablations/CONFIG/BASE")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="a results.csv whose runs need not be made again"
    )
    parser.add_argument("--retry-failed", action="store_true", help="make runs that failed once more")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace runs in DIR that had another configuration"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--dry-run", action="store_true", help="list the runs and their states; start nothing")
    group.add_argument("--collect", action="store_true", help="write the results so far; start nothing")
    group.add_argument("--task", type=int, metavar="N", help="make run N of --dry-run alone, for a job array")


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status, which is 1 if a run failed."""
    path = definition.find(args.config)
    ablation = definition.read(path, train.overrides(args), args.base, _seeds(args.seeds))
    out = args.out or Path("runs/ablations") / ablation.name / ablation.base.stem
    runs = ablation.runs(out)
    run_folder.refuse_shared(run.configured for run in runs)
    known = _known(out, args.results)
    if args.dry_run:
        # The numbers are those that --task takes.
        print(f"# {ablation.name} over {ablation.base}: {len(runs)} runs, {len(ablation.cells)} cells")
        for number, run in enumerate(runs):
            print(f"{number:4d}  {read_outcome(run, known[0]).state.value:11s}  {run.label}")
        return 0
    check_output(out)
    if args.collect:
        return _show(Results(ablation, runs, *known), out)
    if args.task is not None:
        if not 0 <= args.task < len(runs):
            raise UserError(
                f"task: {args.task}: must be from 0 to {len(runs) - 1} (--dry-run lists the runs)"
            )
        _make(ablation, [runs[args.task]], out, args, known, alone=True)
        return int(run_folder.failure(runs[args.task].folder) is not None)
    with only_one(out, "ablate"):
        _make(ablation, runs, out, args, known)
        return _show(Results(ablation, runs, *known), out)


def _known(out: Path, results: Path | None) -> Known:
    """Return the runs in the folder's own earlier results.csv, which every run rewrites, and in `results`."""
    own = out / "results.csv"
    files = [path for path in (own if own.exists() else None, results) if path]
    summaries = {digest: summary for path in files for digest, summary in records.read(path).items()}
    beside = map(records.beside, files)
    return summaries, {d: curve for path in beside for d, curve in records.read_curves(path).items()}


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    seeds = [int(seed) for seed in text.split(",") if seed.strip().isdigit()]
    if len(seeds) != len(text.split(",")) or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds: {text!r} must be different whole numbers, separated by commas")
    return seeds


def _make(
    ablation: Ablation,
    runs: Sequence[Run],
    out: Path,
    args: argparse.Namespace,
    known: Known,
    *,
    alone: bool = False,
) -> None:
    """Make those of `runs` that have no result yet, one after another."""
    if not args.overwrite:
        for run in runs:
            run_folder.check_unchanged(run.folder, run.configured)
    finished = (State.DONE,) if args.retry_failed else (State.DONE, State.FAILED)
    left = [run for run in runs if read_outcome(run, known[0]).state not in finished]
    # Megatron checks every cell before the first run, because the last run may begin hours later.
    for run in {run.cell.name: run for run in left}.values():
        try:
            prepare_run(run.configured, run.folder)
        except UserError as error:
            raise UserError(f"cell {run.cell.name}: {error}") from error
    began, done = time.monotonic(), len(runs) - len(left)
    try:
        for number, run in enumerate(left, 1):
            place = f"{done + number}/{len(runs)}  {run.label}"
            with only_one(run.folder, "ablate"):
                result = _make_one(run, place, run.folder / "data-cache" if alone else None)
            time_left = progress.clock((time.monotonic() - began) / number * (len(left) - number))
            print(f"{place}: {result}; {time_left} left", file=sys.stderr, flush=True)
            if not alone:
                write(Results(ablation, runs, *known), out)
    except (KeyboardInterrupt, launcher.Stopped):
        print("the same command continues where this one was stopped", file=sys.stderr)
        raise


def _make_one(run: Run, label: str, cache: Path | None) -> str:
    """Make a run, from its checkpoint if it has one, and return a line on its result."""
    if run_folder.look(run.folder, run.configured) is State.CHANGED:
        run_folder.clear(run.folder)
    run_folder.forget_failure(run.folder)
    try:
        prepared = prepare_run(run.configured, run.folder, cache=cache)
        summary = train.resume_or_start(prepared, label, one_of_many=True)
    except launcher.Stopped:
        raise
    except (RankFailed, UserError) as error:
        run_folder.note_failure(run.folder, str(error))
        return f"failed: {str(error).splitlines()[0]}"
    if cache:
        shutil.rmtree(cache, ignore_errors=True)
    if summary["steps"] < prepared.steps:
        early = f"ended after step {summary['steps']} of {prepared.steps} (megatron.exit_interval?)"
        run_folder.note_failure(run.folder, early)
        return f"failed: {early}"
    loss = summary["valid_loss"]
    return "no validation loss" if loss is None else f"validation loss {loss:.4f}"


def write(results: Results, out: Path) -> None:
    """Write results.csv, results_curves.csv and ablation.md below `out`, each atomically."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "results.csv", results.csv())
    write_whole(out / "results_curves.csv", records.curves_text(results.logged))
    write_whole(out / "ablation.md", results.markdown())


def _show(results: Results, out: Path) -> int:
    """Write all results, print the tables, name failed runs, and return the exit status."""
    write(results, out)
    plots.draw_differences(out / "differences.png", results)
    plots.draw_curves(out / "curves.png", results)
    # A log or a pipe has no width, and the table must not be folded to 80 columns there.
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in results.tables():
        console.print()
        console.print(table)
    files = "  ".join(str(out / name) for name in ("ablation.md", "results.csv", "differences.png"))
    console.print(f"\n{files}", highlight=False)
    failed = [ended.run for ended in results.outcomes if ended.state is State.FAILED]
    for run in failed:
        print(f"failed: {run.label}: {run.folder / 'failed.txt'}", file=sys.stderr)
    return int(bool(failed))
