"""Draws network.png: the step's speed-up over the bf16 all-to-all against the links' rate."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.methods import BASELINE
from megatron_patch.workflows.plots import pyplot

_MARKERS = "os^vDP*X"


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draw a PNG with a panel per accumulation count and a line per method; byte limits are dashed."""
    plt = pyplot()
    shaped = [one for one in rows if one["rate_mbit"] and one["speedup_vs_bf16_alltoall"] is not None]
    counts = sorted({one["accumulation"] for one in shaped}) or [1]
    names = list(dict.fromkeys(one["name"] for one in shaped))
    figure, panels = plt.subplots(
        1, len(counts), figsize=(5 * len(counts) + 1.5, 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    rates = sorted({one["rate_mbit"] for one in shaped})
    for axes, count in zip(panels[0], counts, strict=True):
        for name, marker, color in zip(names, itertools.cycle(_MARKERS), itertools.cycle(range(10))):
            points = [one for one in shaped if one["name"] == name and one["accumulation"] == count]
            points.sort(key=lambda one: one["rate_mbit"])
            x = [one["rate_mbit"] for one in points]
            y = [one["speedup_vs_bf16_alltoall"] for one in points]
            if name == BASELINE:
                axes.plot(x, y, color="black", linewidth=1, label=name)
                continue
            axes.plot(x, y, color=f"C{color}", marker=marker, linewidth=1.4, label=name)
            limits = [one["byte_limit_speedup"] for one in points]
            if None not in limits:
                axes.plot(x, limits, color=f"C{color}", linestyle="--", linewidth=0.9, alpha=0.8)
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("Mbit/s of every host's link, each way")
        axes.set_title(f"{count} microbatch{'es' if count > 1 else ''} per step", fontsize=10)
        axes.grid(alpha=0.25)
    panels[0][0].set_ylabel("step speed-up over the bf16 all-to-all")
    if shaped:
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, frameon=False, loc="outside right center", title="measured;\ndashed: by bytes"
        )
    figure.suptitle(textwrap.fill(title, 75 * len(counts)), fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)
