"""`report --plan FILE`: what `megatron-loco plan` predicted, as a section of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.untrusted import load_json
from megatron_patch.workflows.report import checks, figures
from megatron_patch.workflows.report.table import digits

_NUMBERS = (
    "step_seconds",
    "speedup",
    "tokens_per_second",
    "exposed_seconds",
    "node_uplink_bytes",
    "memory_bytes",
)
_KEYS = {"recipe", "methods", "recommended", "reason", "curves", "nodes", "gpus_per_node", "microbatches"}


@dataclass(frozen=True)
class Section:
    """What the page shows of a plan."""

    title: str
    reason: str
    head: list[str]
    rows: list[list[str]]
    """Name, then a cell for each of `head`."""
    svg: str
    """Empty where the job has one node."""
    legend: list[figures.Entry]


def read(path: Path) -> dict[str, Any]:
    """The file of `plan --json` or `--out`."""
    try:
        found = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--plan: {path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        raise UserError(f"--plan: {path}: is no plan of megatron-loco plan (--out, --json; not with --scale)")
    for key, fits in (("methods", _are_methods(found["methods"])), ("curves", _are_curves(found["curves"]))):
        if not fits:
            raise UserError(f"--plan: {path}: {key}: is not what megatron-loco plan writes")
    return found


def _are_methods(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("fits"), bool)
        and all(_is_measure(one.get(key)) for key in _NUMBERS)
        for one in value
    )


def _are_curves(value: Any) -> bool:
    """Nothing, of a single node; or of every method as many numbers above 0 as there are bandwidths."""
    if not value:
        return value is None or isinstance(value, dict)
    if not isinstance(value, dict) or not isinstance(value.get("step_seconds"), dict):
        return False
    curves = [value.get("inter_gbit"), *value["step_seconds"].values()]
    return (
        len(curves) > 1
        and all(isinstance(one, list) and len(one) == len(curves[0]) > 0 for one in curves)
        and all(_is_measure(number) and number > 0 for one in curves for number in one)
    )


def _is_measure(value: Any) -> bool:
    return checks.is_number(value) and math.isfinite(value) and (value == 0 or abs(value) > 1e-100)


def section(plan: dict[str, Any]) -> Section:
    """The section of a plan that was read."""
    rows = [
        [
            one["name"] + (" (recommended)" if one["name"] == plan["recommended"] else ""),
            digits(one["step_seconds"]),
            f"{one['speedup']:.2f} x",
            f"{one['tokens_per_second']:,.0f}",
            digits(one["exposed_seconds"]),
            digits(one["node_uplink_bytes"] / 1e9),
            digits(one["memory_bytes"] / 1e9) + ("" if one["fits"] else " (too much)"),
        ]
        for one in plan["methods"]
    ]
    head = ["step (s)", "speed-up", "tokens/s", "exposed (s)", "GB a node sends", "memory GB"]
    title = f"{plan['recipe']} on {plan['nodes']} x {plan['gpus_per_node']} ranks"
    if not plan["curves"]:
        return Section(title, plan["reason"], head, rows, "", [])
    seconds = plan["curves"]["step_seconds"]
    stock = next(iter(seconds.values()))
    legend = [
        figures.Entry(place, name, f"{max(a / b for a, b in zip(stock, one, strict=True)):.2f} x at most")
        for place, (name, one) in enumerate(seconds.items())
    ]
    return Section(title, plan["reason"], head, rows, _picture(plan, title), legend)


def _picture(plan: dict[str, Any], title: str) -> str:
    gbit, seconds = plan["curves"]["inter_gbit"], plan["curves"]["step_seconds"]
    stock = next(iter(seconds.values()))
    with figures.themed("plan") as (canvas, axes):
        for place, one in enumerate(seconds.values()):
            gains = [base / other for base, other in zip(stock, one, strict=True)]
            figures.draw_line(axes, gbit, gains, place, 0)
        axes.set_xscale("log")
        axes.set_xlabel("usable Gbit/s between nodes, of each node")
        axes.set_ylabel("speed, of stock's")
        return figures.for_page(canvas, "plan", f"Predicted speed over bandwidth, {title}")
