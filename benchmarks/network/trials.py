"""`python -m benchmarks.network.trials`: do turns within a run find what separate runs find?

    python -m benchmarks.network.trials --out docs/benchmarks

On each link Megatron trains with each choice by itself (`bf16_alltoall`, `none_exact`, `loco4`,
`loco4_exact`), and with turns: `weight_gather: auto` (`none_auto`) and `compression.trial` (`loco4_trial`).
trials.md has for each link and run what separate runs differ by, and what turns said. It needs root and
iproute2, as benchmarks.network does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.network import hosts, lifeline
from benchmarks.network.command import _rate, processor
from benchmarks.network.llama import Llama
from benchmarks.network.ranks import Ranks
from megatron_patch.errors import UserError

SEPARATE = ("bf16_alltoall", "none_exact", "loco4", "loco4_exact")
TURNS = ("none_auto", "loco4_trial")
CLEAR = 0.10
"""A difference between separate runs that turns should find."""
SMALL = 0.05
"""What a slower choice that is kept may cost."""
HOSTS = 4
MODEL = Llama(layers=2, hidden=256, ffn=688, heads=4, vocabulary=1024)


def measure(rates: Sequence[float | None], runs: int, steps: int, settle: int) -> list[dict[str, Any]]:
    """Return a record for each run and link: seconds a step by separate method, and what turns found."""
    records: dict[Any, dict[str, Any]]
    records = {(run, rate): {"run": run, "rate_mbit": rate} for run in range(runs) for rate in rates}
    with (
        lifeline.ending_cleanly(),
        lifeline.folder() as folder,
        hosts.Network(HOSTS) as network,
        Ranks(network, 1, folder, 600) as ranks,
    ):
        for run in range(runs):
            for method in (*SEPARATE, *TURNS):
                network.shape(None)
                ranks.ask(
                    do="prepare",
                    method=method,
                    llama=asdict(MODEL),
                    overlap=False,
                    buckets=4,
                    ranks_per_host=1,
                    accumulation=1,
                    learning_rate=3e-4,
                    settle=settle,
                    steps=1,
                )
                for rate in rates:
                    network.shape(rate)
                    record = records[run, rate]
                    if method in TURNS:
                        record[method] = ranks.ask(do="trial", accumulation=1)[0]
                    else:
                        answers = ranks.ask(do="measure", steps=steps, accumulation=1)
                        laps = [[lap[0] for lap in answer["laps"]] for answer in answers]
                        slowest = [max(of_ranks) for of_ranks in zip(*laps, strict=True)]
                        record[method] = statistics.median(slowest[1:])
                    print(f"run {run + 1}, {_name(rate)}, {method}: {record[method]}", flush=True)
        network.shape(None)
    return list(records.values())


def _name(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def _percent(after: float, before: float) -> float:
    return 100 * (after / before - 1)


def judged(record: dict[str, Any]) -> dict[str, Any]:
    """Return what separate runs say of a link, beside what turns said, and whether these agree."""
    stock, exact, low, both = (record[method] for method in SEPARATE)
    gather = _percent(exact, stock)
    kept = record["none_auto"]["kept"]
    slower = gather if kept else _percent(stock, exact)
    rows = {row["choice"]: row for row in record["loco4_trial"]["rows"]}
    agrees = {}
    for name, seconds in (("4-bit gradients", low), ("4-bit gradients, exact gather", both)):
        row = rows[name]
        # Beyond the interval: both say that it is faster, or both that it is slower.
        agrees[name] = row["low"] <= 0 <= row["high"] or (row["high"] < 0) == (seconds < stock)
    return {
        "gather": gather,
        "kept": kept,
        "clear": abs(gather) > 100 * CLEAR,
        "kept_the_faster": (gather < 0) == kept,
        "kept_costs": max(slower, 0.0) if kept else 0.0,
        "missed": max(slower, 0.0) if not kept else 0.0,
        "low": _percent(low, stock),
        "both": _percent(both, stock),
        "agrees": agrees,
    }


def markdown(records: Iterable[dict[str, Any]]) -> str:
    """Return the table of all links and runs, and what it comes to."""
    lines = [
        "| link | stock (s a step) | exact gather | turns: kept, steps | 4 bits | turns "
        "| 4 bits, exact | turns |",
        "| --- | ---: | ---: | --- | ---: | --- | ---: | --- |",
    ]
    all_judged = []
    for record in records:
        found = judged(record)
        all_judged.append(found)
        auto, rows = record["none_auto"], {row["choice"]: row for row in record["loco4_trial"]["rows"]}
        low, both = rows["4-bit gradients"], rows["4-bit gradients, exact gather"]
        said = [f"{r['percent']:+.0f} % ({r['low']:+.0f} to {r['high']:+.0f})" for r in (low, both)]
        kept = f"{'exact' if auto['kept'] else 'stock'}, {auto['steps']}"
        lines.append(
            f"| {_name(record['rate_mbit'])} | {record[SEPARATE[0]]:.3f} | {found['gather']:+.0f} % "
            f"| {kept} | {found['low']:+.0f} % | {said[0]} | {found['both']:+.0f} % | {said[1]} |"
        )
    clear = [found for found in all_judged if found["clear"]]
    faster = sum(found["kept_the_faster"] for found in clear)
    worst, missed = (max(found[name] for found in all_judged) for name in ("kept_costs", "missed"))
    agreed = [agrees for found in all_judged for agrees in found["agrees"].values()]
    lines += [
        "",
        f"- Separate runs differed by more than {CLEAR:.0%} in {len(clear)} of {len(all_judged)} runs: "
        f"the faster gather was kept in {faster} of them.",
        f"- The dearest slower choice that was kept cost {worst:.1f} %; the largest gain that was missed was "
        f"{missed:.1f} %.",
        f"- The trial's verdicts on 4 bits agreed with separate runs in {sum(agreed)} of {len(agreed)}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.trials", description=__doc__)
    parser.add_argument("--rates", default="25,100,300,1000,unshaped", help="Mbit/s, or 'unshaped'")
    parser.add_argument("--runs", type=int, default=5, help="of each link; default 5")
    parser.add_argument("--steps", type=int, default=12, help="of each separate run; default 12")
    parser.add_argument("--settle", type=int, default=30, help="unmeasured steps before; default 30")
    parser.add_argument("--out", type=Path, required=True, help="the folder of trials.json and trials.md")
    args = parser.parse_args()
    try:
        rates = [_rate(text) for text in args.rates.split(",")]
        hosts.check()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = measure(rates, args.runs, args.steps, args.settle)
    content = {"device": processor(), "model": asdict(MODEL), "hosts": HOSTS, "runs": records}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "trials.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    ordered = sorted(records, key=lambda record: (record["rate_mbit"] or float("inf"), record["run"]))
    (args.out / "trials.md").write_text(markdown(ordered), encoding="utf-8")
    print(markdown(ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
