"""`report --plan FILE`: what `megatron-loco plan` predicted, as a section of the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.untrusted import load_json
from megatron_patch.workflows import plots
from megatron_patch.workflows.report.figures import Entry
from megatron_patch.workflows.report.table import digits

_HEAD = ["step (s)", "speed-up", "tokens/s", "exposed (s)", "GB a node sends", "memory GB"]


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
    legend: list[Entry]


def read(path: Path) -> Section:
    """The section of a file of `plan --json` or `--out`."""
    try:
        return section(load_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"--plan: {path}: cannot be read: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--plan: {path}: is no plan of megatron-loco plan (--out, --json; not with --scale)"
        ) from error


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
    title = f"{plan['recipe']} on {plan['nodes']} x {plan['gpus_per_node']} ranks"
    if not plan["curves"]:
        return Section(title, plan["reason"], _HEAD, rows, "", [])
    seconds = plan["curves"]["step_seconds"]
    stock = next(iter(seconds.values()))
    gains = {name: [a / b for a, b in zip(stock, one, strict=True)] for name, one in seconds.items()}
    legend = [
        Entry(place, name, f"{max(each):.2f} x at most") for place, (name, each) in enumerate(gains.items())
    ]
    with plots.svg_axes("plan") as (figure, axes):
        for place, each in enumerate(gains.values()):
            plots.svg_line(axes, plan["curves"]["inter_gbit"], each, place, 0)
        axes.set_xscale("log")
        axes.set_xlabel("usable Gbit/s between nodes, of each node")
        axes.set_ylabel("speed, of stock's")
        svg = plots.svg_element(figure, "plan", f"Predicted speed over bandwidth, {title}")
    return Section(title, plan["reason"], _HEAD, rows, svg, legend)
