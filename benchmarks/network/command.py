"""`python -m benchmarks.network`: Megatron training over slow links between namespaces of this machine.

Hosts are network namespaces at a bridge, and `tc tbf` shapes every host's link in both directions. Megatron
trains a small LLaMA over them with different gradient exchanges. The step time, the exchange alone and the
bytes by the interfaces' counters go into a table, network.json and network.png. The command needs root and
iproute2. It does not touch this machine's own network, and nothing remains, however it ends. How it works and
what was measured: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.network import hosts, lifeline, results
from benchmarks.network.llama import Llama
from benchmarks.network.methods import (
    ALL_REDUCE,
    BASELINE,
    FIRST_STEPS,
    ONEBIT,
    ONEBIT_WARM_UP,
    Method,
    parse,
)
from benchmarks.network.plan import Plan
from benchmarks.network.results import Cell
from megatron_patch.errors import UserError
from megatron_patch.files import output_folder

DEFAULT_METHODS = f"{BASELINE},loco4,loco2,loco4_exact,ddp_bf16"
_UNSHAPED_STEPS = 5
_MOST_UNSHAPED = 1 << 24
"""The most bytes that a rank sends when collectives are timed alone; on slow links, those of a second."""
_LEARNING_RATE = 3e-4
_SETTLE = 45
"""After this many steps of the default model the exact gather is within 5 % of its bits at step 60."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.network`."""
    parser.add_argument("--hosts", type=int, default=4, choices=(2, 4, 8), help="default 4")
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="R", help="their traffic is not shaped; default 1"
    )
    parser.add_argument(
        "--rates", default="100,300,1000", metavar="A,B", help="Mbit/s, or 'unshaped'; default 100,300,1000"
    )
    parser.add_argument(
        "--accumulation", default="1,4", metavar="A,B", help="microbatches a step; default 1,4"
    )
    parser.add_argument(
        "--methods",
        default=DEFAULT_METHODS,
        metavar="A,B",
        help=f"default {DEFAULT_METHODS}; also fp32_reduce_scatter, bf16_reduce_scatter, bf16_allreduce, "
        "loco8, naive4, loco4_two_hop, none_exact, loco2_exact, onebit_adam, onebit_adam_warmup, "
        "onebit_adam_two_hop, ddp_powersgd_rank4, or 'all'",
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured in each cell; default 5")
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        metavar="N",
        help="all cells so often, in turns, where other work on the machine comes and goes; default 1",
    )
    parser.add_argument(
        "--settle",
        type=int,
        default=_SETTLE,
        metavar="N",
        help=f"unmeasured steps before them, until Adam's moments have settled; default {_SETTLE}",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=_LEARNING_RATE, metavar="R", help=f"default {_LEARNING_RATE}"
    )
    parser.add_argument("--overlap", action="store_true", help="exchange buckets during backward")
    parser.add_argument("--buckets", type=int, default=8, metavar="N", help="of the gradients; default 8")
    for name, default in asdict(Llama()).items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument(
        "--patience", type=float, default=120, metavar="S", help="seconds until a silent link fails the run"
    )
    parser.add_argument(
        "--links",
        action="store_true",
        help="time the collectives alone at every rate, too (network.json: links)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write network.json and network.png here")


ALL_METHODS = (
    *("fp32_reduce_scatter", "bf16_reduce_scatter", BASELINE, ALL_REDUCE),
    *("none_exact", "loco8", "loco4", "loco2", "loco4_exact"),
    *(ONEBIT_WARM_UP, ONEBIT, "ddp_bf16", "ddp_powersgd_rank4"),
)


def plan(args: argparse.Namespace) -> Plan:
    """Return the plan of parsed arguments.

    Raises:
        UserError: a value is not allowed; the message names the option, the value and what is allowed.
    """
    names = ALL_METHODS if args.methods == "all" else _split(args.methods)
    if not names or len(set(names)) != len(names):
        raise UserError(f"--methods: {args.methods!r} must be different names, separated by commas")
    methods = tuple(map(parse, names))
    if BASELINE in names:  # It is always measured first, because every speed-up refers to it.
        methods = tuple(sorted(methods, key=lambda method: method.name != BASELINE))
    if args.settle < FIRST_STEPS:
        raise UserError(f"--settle: {args.settle} is not allowed; it must be {FIRST_STEPS} or more")
    if not 0 < args.learning_rate <= 1:
        raise UserError(f"--learning-rate: {args.learning_rate:g} must be more than 0 and at most 1")
    for method in methods:
        method.compression(args.ranks_per_host, args.settle)
    for name in ("ranks_per_host", "steps", "passes", "buckets", *asdict(Llama())):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: {getattr(args, name)} is not allowed; it must be 1 or more")
    if args.ranks_per_host > 8:
        raise UserError(f"--ranks-per-host: {args.ranks_per_host} is not allowed; it must be 8 or less")
    if args.hidden % (2 * args.heads):
        raise UserError(f"--hidden: {args.hidden} must be a multiple of twice --heads, {2 * args.heads}")
    if not args.patience >= 1:
        raise UserError(f"--patience: {args.patience:g} is not allowed; it must be 1 second or more")
    return Plan(
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        methods=methods,
        accumulation=_different("--accumulation", [_count(text) for text in _split(args.accumulation)]),
        rates=_different("--rates", [_rate(text) for text in _split(args.rates)]),
        steps=args.steps,
        overlap=args.overlap,
        buckets=args.buckets,
        llama=Llama(**{name: getattr(args, name) for name in asdict(Llama())}),
        learning_rate=args.learning_rate,
        settle=args.settle,
        passes=args.passes,
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _different(option: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if not values or len(set(values)) != len(values):
        raise UserError(f"{option}: must be different numbers, separated by commas")
    return tuple(values)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise UserError(f"--accumulation: {text!r} is not allowed; it must be a whole number from 1 to 1024")
    return int(text)


def _rate(text: str) -> float | None:
    if text == "unshaped":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate <= 100_000:
        raise UserError(f"--rates: {text!r} is not allowed; it must be 1 to 100000 Mbit/s, or 'unshaped'")
    return rate


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    what = plan(args)
    hosts.check()
    if args.out:
        output_folder(args.out)
    started = time.monotonic()
    curves: list[dict[str, Any]] = []
    rows, start_seconds = measure(what, args.patience, curves if args.links else None)
    result = {
        "rows": rows,
        "links": curves,
        "whole_runs": results.whole_runs(rows),
        "notes": results.NOTES,
        "command": shlex.join(["python", "-m", "benchmarks.network", *sys.argv[1:]]),
        "model": asdict(what.llama) | {"parameters": what.llama.parameters},
        "learning_rate": what.learning_rate,
        "settle": what.settle,
        "steps": what.steps,
        "passes": what.passes,
        "overlap": what.overlap,
        "buckets": what.buckets,
        "device": processor(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "start_seconds": start_seconds,
        "seconds": time.monotonic() - started,
        "versions": {"python": platform.python_version(), "linux": platform.release()}
        | {name: metadata.version(name) for name in ("torch", "megatron-core", "megatron-loco")},
    }
    title = (
        f"{what.hosts} hosts, {what.ranks_per_host} rank{'s' if what.ranks_per_host > 1 else ''} each, "
        f"LLaMA of {what.llama.parameters / 1e6:.1f} M parameters, {what.llama.microbatch} x "
        f"{what.llama.sequence} tokens a microbatch, learning rate "
        f"{what.learning_rate:g}{', overlapped' if what.overlap else ''}"
    )
    files = [args.json] if args.json else []
    if args.out:
        from benchmarks.network import plot

        files.append(args.out / "network.json")
        (args.out / "network.md").write_text(results.markdown(rows), encoding="utf-8")
        plot.draw(args.out / "network.png", rows, title)
    for path in files:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"{title}; {result['device']}, {result['cpu_count']} cores", highlight=False)
    console.print(results.table(rows))
    for line in results.sentences(rows):
        console.print(line, highlight=False, soft_wrap=True)
    if args.out:
        console.print(f"\n{args.out / 'network.json'}  {args.out / 'network.png'}", highlight=False)
    return 0


def measure(
    what: Plan, patience: float, curves: list[dict[str, Any]] | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Measure all cells over a network that exists only during this call.

    Returns the rows, and the seconds of the start. If `curves` is a list, the curves of the collectives
    alone (collectives.py) at every rate are added to it.

    Raises:
        RankFailed: a rank or a host failed; the message says which, and why.
    """
    from benchmarks.network.progress import Show
    from benchmarks.network.ranks import Ranks

    found: dict[Cell, dict[str, Any]] = {}
    with (
        lifeline.ending_cleanly(),
        lifeline.folder() as folder,
        hosts.Network(what.hosts) as network,
        Show(what) as show,
    ):
        show.say(f"starting torchrun on {what.hosts} hosts, {what.hosts * what.ranks_per_host} ranks in all")
        with Ranks(network, what.ranks_per_host, folder, patience) as ranks:
            start_seconds = show.elapsed()
            built: tuple[Method, int] | None = None
            prepared: dict[tuple[Method, int], list[list[dict[str, Any]]]] = {}
            measured: dict[Cell, list[list[dict[str, Any]]]] = {}
            for rate in what.rates if curves is not None else ():
                show.say("the collectives alone")
                network.shape(rate)
                most = _MOST_UNSHAPED if rate is None else min(_MOST_UNSHAPED, int(rate * 1e6 / 8))
                timed = ranks.ask(do="links", ranks_per_host=what.ranks_per_host, most=most)[0]["curves"]
                assert curves is not None
                curves += [curve | {"rate_mbit": rate} for curve in timed]
            for cell in what.cells:
                if built != (cell.method, cell.accumulation):
                    built = (cell.method, cell.accumulation)
                    show.say(f"{cell.method.name}: building")
                    network.shape(None)
                    answers = ranks.ask(
                        do="prepare",
                        method=cell.method.name,
                        llama=asdict(what.llama),
                        overlap=what.overlap,
                        buckets=what.buckets,
                        ranks_per_host=what.ranks_per_host,
                        accumulation=cell.accumulation,
                        learning_rate=what.learning_rate,
                        settle=what.settle,
                        steps=min(what.steps, _UNSHAPED_STEPS),
                    )
                    prepared.setdefault(built, []).append(answers)
                    show.learned(results.unshaped_seconds(answers) / cell.accumulation)
                network.shape(cell.rate_mbit)
                show.begin(cell)
                steps = -(-what.steps // cell.method.outer) * cell.method.outer
                answers = ranks.ask(do="measure", steps=steps, accumulation=cell.accumulation)
                measured.setdefault(cell, []).append(answers)
                of_passes = results.pooled(prepared[built]), results.pooled(measured[cell])
                found[cell] = results.row(cell, what.hosts, what.ranks_per_host, *of_passes)
                show.end(cell, found[cell])
            network.shape(None)
    rows = list(found.values())
    rows.sort(key=lambda row: (row["accumulation"], row["rate_mbit"] or float("inf")))
    results.compare(rows, what.overlap)
    return rows, start_seconds


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
