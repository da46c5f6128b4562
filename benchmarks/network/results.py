"""Turns the ranks' measurements into rows: step and exchange, bytes, speed-ups, and limits by bytes.

A row is one cell: a method at a rate and an accumulation count. A step's times are those of its slowest rank,
and a row has the median over the steps. `byte_limit_speedup` is what bytes predict for the whole step:

    limit(method) = U(method) + 8 * interface_bytes(method) / rate
    byte_limit_speedup = limit(bf16_alltoall) / limit(method)

U is the step of the same method and accumulation count without rate limits, measured just before in the same
run: all arithmetic, including compression. interface_bytes are per step, those of the busiest host in its
busier direction, by the interface's counters.

1-bit Adam has two kinds of steps, with a row for each; `whole_runs` combines them to a run's mean step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.network.methods import (
    ALL_REDUCE,
    BASELINE,
    ONEBIT,
    ONEBIT_WARM_UP,
    Method,
)

WARM_UP_SHARE = 0.15
"""The share of a run's steps that `whole_runs` counts as the warm-up of 1-bit Adam."""

NOTES = {
    "step_seconds": "median over steps (outer steps: mean) of the slowest rank's time, barrier to barrier",
    "exchange_seconds": "of that, the exchange of gradients (1-bit Adam: momentum) alone, after a barrier "
    "(overlap: what is not hidden)",
    "gather_seconds": "of that, the gather of the updated weights (none with a replicated optimizer), by the "
    "exact gather with coding, lengths and decoding",
    "compute_seconds": "step_seconds less exchange_seconds and gather_seconds",
    "gradient_bytes": "payload of gradients sent by one rank per step; gloo's reduce-scatter moves twice it",
    "weight_gather": "stock: Megatron's own, in full; exact: changes, in an exact code",
    "weight_bytes": "payload of weights sent by one rank per step, the mean of the measured steps",
    "weight_bits": "that, in bits a weight (null with a replicated optimizer)",
    "weight_bits_first_steps": "the same of each unmeasured step, from a model's first (exact gather only)",
    "interface_bytes": "per step, by the interface's counters, of the busiest host in its busier direction "
    "(headers counted once for each packet of up to 64 KiB)",
    "exchange_interface_bytes": "of that, during the gradient exchange alone (none with overlap)",
    "loopback_bytes": "per step, what ranks of one host sent each other, unshaped; the busiest host",
    "speedup_vs_bf16_alltoall": "ratio of step_seconds, same rate, accumulation, model and run",
    "exchange_speedup_vs_bf16_alltoall": "ratio of exchange_seconds, likewise",
    "speedup_vs_bf16_allreduce": "ratio of step_seconds, likewise: stock Megatron, replicated optimizer",
    "unshaped_step_seconds": "step_seconds of the same method and accumulation without rate limits, same run",
    "byte_limit_speedup": "ratio of unshaped_step_seconds + 8 * interface_bytes / rate (none with overlap)",
    "rate_mbit": "of every host's link, in each direction, 10^6 bits per second; null: not shaped",
}


@dataclass(frozen=True)
class Cell:
    """One measurement: a method at a rate (None: unshaped) and an accumulation count."""

    method: Method
    accumulation: int
    rate_mbit: float | None


def slowest_median(laps_of_ranks: Sequence[Sequence[float]]) -> float:
    """Return the median over steps of the slowest rank's seconds."""
    return statistics.median(max(times) for times in zip(*laps_of_ranks, strict=True))


def slowest_mean(laps_of_ranks: Sequence[Sequence[float]]) -> float:
    """Return the mean over steps, some of which make an outer step, of the seconds of the slowest rank."""
    return max(statistics.fmean(times) for times in laps_of_ranks)


def unshaped_seconds(prepared: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of a step without rate limits, from the ranks' answers to "prepare"."""
    return slowest_median([answer["unshaped_step_seconds"] for answer in prepared])


def pooled(passes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combine the ranks' answers to the same order in several passes into one answer of each rank."""
    return [_pooled(answers) for answers in zip(*passes, strict=True)]


def _pooled(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    one = dict(answers[0])
    for key in one:
        values = [answer[key] for answer in answers]
        if key in ("laps", "unshaped_step_seconds"):
            one[key] = [lap for laps in values for lap in laps]
        elif key in ("sent", "received", "loopback", "exchange_sent", "exchange_received"):
            one[key] = sum(values)
        elif key in ("weight_bytes", "weight_bits") and None not in values:
            one[key] = statistics.fmean(values)
    return one


def row(
    cell: Cell,
    hosts: int,
    ranks_per_host: int,
    prepared: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the row of a cell, without the values that need the baseline.

    Args:
        prepared: the ranks' answers to "prepare" (rank.py), combined over all passes.
        answers: the ranks' answers to "measure", combined over all passes.
    """
    steps = len(answers[0]["laps"])
    typical = slowest_mean if cell.method.outer > 1 else slowest_median
    step, exchange, gather = (
        typical([[lap[part] for lap in answer["laps"]] for answer in answers]) for part in range(3)
    )
    return {
        "method": cell.method.method,
        "name": cell.method.name,
        "bits": cell.method.bits,
        "topology": cell.method.topology,
        "rate_mbit": cell.rate_mbit,
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "accumulation": cell.accumulation,
        "step_seconds": step,
        "exchange_seconds": exchange,
        "gather_seconds": gather,
        "compute_seconds": step - exchange - gather,
        "gradient_bytes": max(a["gradient_bytes"] for a in answers),
        "weight_gather": "exact" if cell.method.exact else "stock",
        "weight_bytes": max(a["weight_bytes"] for a in answers),
        "weight_bits": _most([a["weight_bits"] for a in answers]),
        "weight_bits_first_steps": _first_steps(prepared),
        "interface_bytes": max(max(a["sent"], a["received"]) for a in answers) / steps,
        "exchange_interface_bytes": max(max(a["exchange_sent"], a["exchange_received"]) for a in answers)
        / steps,
        "loopback_bytes": max(a["loopback"] for a in answers) / steps,
        "unshaped_step_seconds": unshaped_seconds(prepared),
    }


def _most(found: Sequence[float | None]) -> float | None:
    return max((one for one in found if one is not None), default=None)


def _first_steps(prepared: Sequence[dict[str, Any]]) -> list[float] | None:
    if any(answer["weight_bits_first_steps"] is None for answer in prepared):
        return None
    of_ranks = (answer["weight_bits_first_steps"] for answer in prepared)
    return [max(bits) for bits in zip(*of_ranks, strict=True)]


def byte_limit_seconds(row: dict[str, Any]) -> float:
    """Return a step's seconds by its bytes: the step without rate limits, plus the bytes over the rate."""
    return row["unshaped_step_seconds"] + 8 * row["interface_bytes"] / (row["rate_mbit"] * 1e6)


def compare(rows: Sequence[dict[str, Any]], overlap: bool) -> None:
    """Add to each row its speed-ups over the baseline of the same rate and accumulation; None without one.

    There is no byte limit with overlap, because bytes are then sent while ranks compute.
    """
    baselines, all_reduces = _by_cell(rows, BASELINE), _by_cell(rows, ALL_REDUCE)
    for one in rows:
        one.update(
            speedup_vs_bf16_alltoall=None, exchange_speedup_vs_bf16_alltoall=None, byte_limit_speedup=None
        )
        all_reduce = all_reduces.get(_cell(one))
        one["speedup_vs_bf16_allreduce"] = all_reduce and all_reduce["step_seconds"] / one["step_seconds"]
        base = baselines.get(_cell(one))
        if base is None:
            continue
        one["speedup_vs_bf16_alltoall"] = base["step_seconds"] / one["step_seconds"]
        if one["exchange_seconds"] > 0 and not overlap:
            exchange = base["exchange_seconds"] / one["exchange_seconds"]
            one["exchange_speedup_vs_bf16_alltoall"] = exchange
        if one["rate_mbit"] is not None and not overlap:
            one["byte_limit_speedup"] = byte_limit_seconds(base) / byte_limit_seconds(one)


def _cell(one: dict[str, Any]) -> tuple[float | None, int]:
    return one["rate_mbit"], one["accumulation"]


def _by_cell(rows: Sequence[dict[str, Any]], name: str) -> dict[tuple[float | None, int], dict[str, Any]]:
    return {_cell(one): one for one in rows if one["name"] == name}


def whole_runs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean step of a whole run with 1-bit Adam, if both of its phases were measured.

    `WARM_UP_SHARE` of the steps are as in the row of the warm-up, and the others as in the compressed row.
    Speed-up and bytes saved are relative to bf16_allreduce; None if that was not measured.
    """
    warm_ups, all_reduces = _by_cell(rows, ONEBIT_WARM_UP), _by_cell(rows, ALL_REDUCE)
    found = []
    for one in rows:
        warm_up, base = warm_ups.get(_cell(one)), all_reduces.get(_cell(one))
        if one["method"] != ONEBIT or one is warm_up or warm_up is None:
            continue
        run: dict[str, Any] = {"name": one["name"], "warm_up_share": WARM_UP_SHARE}
        run |= {key: one[key] for key in ("rate_mbit", "accumulation", "hosts", "ranks_per_host")}
        for key in ("step_seconds", "interface_bytes"):
            run[key] = WARM_UP_SHARE * warm_up[key] + (1 - WARM_UP_SHARE) * one[key]
        run["speedup_vs_bf16_allreduce"] = base and base["step_seconds"] / run["step_seconds"]
        run["bytes_saved_vs_bf16_allreduce"] = base and base["interface_bytes"] / run["interface_bytes"]
        found.append(run)
    return found


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for run in whole_runs(rows):
        text = (
            f"{run['name']}, {_rate(run)}, accumulation {run['accumulation']}, a whole run with "
            f"{run['warm_up_share']:.0%} warm-up: {run['step_seconds']:.3f} s and "
            f"{run['interface_bytes'] / 1e6:.2f} MB a step"
        )
        if run["speedup_vs_bf16_allreduce"] is not None:
            text += (
                f", {run['speedup_vs_bf16_allreduce']:.2f} times faster than {ALL_REDUCE} and "
                f"{run['bytes_saved_vs_bf16_allreduce']:.2f} times fewer bytes"
            )
        lines.append(text)
    return lines


def _rate(one: dict[str, Any]) -> str:
    return "unshaped" if one["rate_mbit"] is None else f"{one['rate_mbit']:g} Mbit/s"


_COLUMNS = (
    "method",
    "Mbit/s",
    "accum.",
    "step (s)",
    "exchange (s)",
    "gradient MB",
    "weight MB",
    "weight bits",
    "interface MB",
    "of it exchange",
    "exchange speed-up",
    "step speed-up",
    "by bytes",
)
_OVER_ALL_REDUCE = "over all-reduce"
"""An additional column if an all-reduce was measured."""


def _columns(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    measured = any(one["speedup_vs_bf16_allreduce"] is not None for one in rows)
    return (*_COLUMNS, _OVER_ALL_REDUCE) if measured else _COLUMNS


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the terminal: bytes per step, and speed-ups over the bf16 all-to-all."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = _columns(rows)
    for column in columns:
        name = column == "method"
        shown.add_column(column, justify="left" if name else "right", no_wrap=name)
    last = None
    for one in rows:
        if last not in (None, (one["accumulation"], one["rate_mbit"])):
            shown.add_row()
        last = one["accumulation"], one["rate_mbit"]
        shown.add_row(*_texts(one)[: len(columns)])
    return shown


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    columns = _columns(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_texts(one)[: len(columns)]) + " |" for one in rows]
    if said := sentences(rows):
        lines += ["", *(f"- {sentence}" for sentence in said)]
    return "\n".join(lines) + "\n"


def _texts(one: dict[str, Any]) -> list[str]:
    def ratio(name: str) -> str:
        return "-" if one[name] is None else f"{one[name]:.2f} x"

    return [
        one["name"],
        "unshaped" if one["rate_mbit"] is None else f"{one['rate_mbit']:g}",
        str(one["accumulation"]),
        f"{one['step_seconds']:.3f}",
        f"{one['exchange_seconds']:.3f}",
        f"{one['gradient_bytes'] / 1e6:.2f}",
        f"{one['weight_bytes'] / 1e6:.2f}",
        "-" if one["weight_bits"] is None else f"{one['weight_bits']:.2f}",
        f"{one['interface_bytes'] / 1e6:.2f}",
        f"{one['exchange_interface_bytes'] / 1e6:.2f}" if one["exchange_interface_bytes"] else "-",
        ratio("exchange_speedup_vs_bf16_alltoall"),
        ratio("speedup_vs_bf16_alltoall"),
        ratio("byte_limit_speedup"),
        ratio("speedup_vs_bf16_allreduce"),
    ]
