"""Pictures of runs."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any


def draw_comparison(
    path: Path, curves: dict[str, list[dict[str, Any]]], summaries: dict[str, dict[str, Any]]
) -> None:
    """Training loss against step, and bytes sent per step (gradients and weights), as a PNG at `path`."""
    plt = pyplot()
    figure, (losses, wire) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    styles = itertools.cycle(("-", "--", ":", "-."))
    for name, records in curves.items():
        points = [(r["step"], r["loss"]) for r in records if r["loss"] is not None]
        valid = summaries[name]["valid_loss"]
        label = name if valid is None else f"{name} (validation {valid:.4f})"
        losses.plot(*zip(*points, strict=True), label=label, linestyle=next(styles), linewidth=1.4)
    losses.set_xlabel("optimizer step")
    losses.set_ylabel("training loss")
    losses.legend(frameon=False)
    losses.grid(alpha=0.25)

    names = list(summaries)
    gradients = [summaries[n]["gradient_wire"]["bytes_per_step"] / 1e6 for n in names]
    weights = [summaries[n]["weight_wire"]["bytes_per_step"] / 1e6 for n in names]
    rows = [f"{name}\n{_bits(summaries[name])} bits" for name in names]
    wire.barh(rows, gradients, label="gradients", height=0.5)
    wire.barh(rows, weights, left=gradients, label="weights", alpha=0.4, height=0.5)
    wire.invert_yaxis()
    wire.set_xlabel("MB sent by one rank per step")
    wire.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _bits(summary: dict[str, Any]) -> str:
    return " + ".join(f"{summary[wire]['bits_per_element']:.1f}" for wire in ("gradient_wire", "weight_wire"))


def draw_kernels(path: Path, result: dict[str, Any]) -> None:
    """Elements per second of each way to compress, as bars beside the bound that memcpy sets; a PNG."""
    plt = pyplot()
    rates = {name: rate for name, rate in result["elements_per_second"].items() if name != "native"}
    names = sorted(rates, key=lambda name: rates[name])
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(names) + 1.6), layout="constrained")
    bars = axes.barh(
        [name.replace("_", " ") for name in names], [rates[name] / 1e6 for name in names], height=0.6
    )
    axes.bar_label(bars, fmt=" {:,.0f}")
    bound = 2 * result["memcpy_bytes_per_second"] / result["bytes_per_element"] / 1e6
    axes.axvline(
        bound, color="black", linestyle="--", linewidth=1, label=f"memory bound by memcpy: {bound:,.0f}"
    )
    axes.set_xlabel(f"M elements per second, compress to {result['bits']} bits, {result['dtype']} gradients")
    axes.margins(x=0.12)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=140)
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib.pyplot, for files."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # Megatron lets every INFO line through
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
