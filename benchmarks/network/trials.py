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
from collections.abc import Sequence
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


def judged(record: dict[str, Any], separate: dict[str, float]) -> dict[str, Any]:
    """Return whether turns agree with what separate runs took, the median seconds of each over all runs."""
    stock, exact, low, both = (separate[method] for method in SEPARATE)
    gather, kept = _percent(exact, stock), record["none_auto"]["kept"]
    rows = {row["choice"]: row for row in record["loco4_trial"]["rows"]}
    found = {"4-bit gradients": low, "4-bit gradients, exact gather": both}
    return {
        "clear": abs(gather) > 100 * CLEAR,
        "kept_the_faster": (gather < 0) == kept,
        "kept_costs": max(gather, 0.0) if kept else 0.0,
        "missed": max(_percent(stock, exact), 0.0) if not kept else 0.0,
        # Beyond the interval: both say that it is faster, or both that it is slower.
        "agrees": [
            row["low"] <= 0 <= row["high"] or (row["high"] < 0) == (seconds < stock)
            for name, seconds in found.items()
            for row in [rows[name]]
        ],
    }


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of all links and runs, and what it comes to."""
    lines = [
        "| link | run | stock (s a step) | exact gather | turns | kept, steps | 4 bits | turns "
        "| 4 bits, exact | turns |",
        "| --- | --- | ---: | ---: | --- | --- | ---: | --- | ---: | --- |",
    ]
    separate = {
        rate: {m: statistics.median(r[m] for r in records if r["rate_mbit"] == rate) for m in SEPARATE}
        for rate in {record["rate_mbit"] for record in records}
    }
    for record in records:
        auto, rows = record["none_auto"], {row["choice"]: row for row in record["loco4_trial"]["rows"]}
        turns = [auto["rows"][1], rows["4-bit gradients"], rows["4-bit gradients, exact gather"]]
        said = [f"{row['percent']:+.0f} % ({row['low']:+.0f} to {row['high']:+.0f})" for row in turns]
        alone = [f"{_percent(record[method], record[SEPARATE[0]]):+.0f} %" for method in SEPARATE[1:]]
        kept = f"{'exact' if auto['kept'] else 'stock'}, {auto['steps'] - 1}"
        cells = [_name(record["rate_mbit"]), record["run"] + 1, f"{record[SEPARATE[0]]:.3f}"]
        cells += [alone[0], said[0], kept, alone[1], said[1], alone[2], said[2]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    found = [judged(record, separate[record["rate_mbit"]]) for record in records]
    clear = [each["kept_the_faster"] for each in found if each["clear"]]
    worst, missed = (max(each[name] for each in found) for name in ("kept_costs", "missed"))
    agreed = [agrees for each in found for agrees in each["agrees"]]
    lines += [
        "",
        f"- Where separate runs differ by more than {CLEAR:.0%} in the median, the faster gather was kept in "
        f"{sum(clear)} of {len(clear)} runs.",
        f"- The dearest slower gather that was kept costs {worst:.1f} %; the largest gain that was missed is "
        f"{missed:.1f} %.",
        f"- What the trial says of 4 bits agrees with separate runs in {sum(agreed)} of {len(agreed)} cases.",
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
