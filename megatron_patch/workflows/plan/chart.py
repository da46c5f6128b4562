"""The chart of a plan: the step of each method over the bandwidth between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(path: Path, plan: dict[str, Any]) -> None:
    """Tokens a second against Gbit/s of a node's uplink, from show.as_json, as a PNG (or SVG) at `path`."""
    from megatron_patch.workflows.plots import pyplot

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    lines(axes, plan)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def lines(axes: Any, plan: dict[str, Any]) -> None:
    """The curves of a plan: speed of each method against stock's own at the same bandwidth."""
    curves = plan["curves"]
    stock = curves["step_seconds"][plan["methods"][0]["name"]]
    styles = ("-", "--", ":", "-.")
    for number, (name, seconds) in enumerate(curves["step_seconds"].items()):
        gains = [base / one for base, one in zip(stock, seconds, strict=True)]
        best = name == plan["recommended"]
        axes.plot(
            curves["inter_gbit"], gains, styles[number % 4], linewidth=2.4 if best else 1.3,
            label=f"{name} (recommended here)" if best else name,
        )  # fmt: skip
    here = 8 * plan["inter_bytes_per_second"] / 1e9
    axes.axvline(here, color="black", linewidth=0.8)
    axes.annotate(
        "here", (here, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
    )
    axes.set_xscale("log")
    axes.set_xlabel("usable Gbit/s between nodes, of each node")
    axes.set_ylabel("speed, of stock's at that bandwidth")
    axes.set_title(
        f"{plan['recipe']}, {plan['nodes']} x {plan['gpus_per_node']} ranks, "
        f"{plan['microbatches']} microbatches a step (predicted)", fontsize=10,
    )  # fmt: skip
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
