"""What users are told: a session's lines in the log, and the StepReport of a rank's last optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.loco import STATISTICS
from megatron_patch.session.session import Session
from megatron_patch.step_report import StepReport


@dataclass
class Sums:
    """What this rank's gradient exchanges sent in the last step, summed over model chunks."""

    traffic: Traffic = field(default_factory=Traffic)
    inside_bytes: float = 0.0
    compression_seconds: float = 0.0
    statistics: torch.Tensor = field(
        default_factory=lambda: torch.zeros(len(STATISTICS), dtype=torch.float64, device="cpu")
    )
    """loco.STATISTICS, fp64 [5] on CPU; NaN if they were not measured in this step."""
    compressed: bool = False


def sums(states: Sequence[Session]) -> Sums:
    """Sum the last step's exchanges over model chunks; on CUDA it waits for the last exchange."""
    total = Sums()
    for report in (state.report for state in states):
        total.traffic.add(report.traffic)
        total.inside_bytes += report.inside_bytes
        total.compression_seconds += report.compression_seconds()
        total.compressed |= report.compressed
        if report.statistics is not None:
            total.statistics += report.statistics.cpu()
        elif report.compressed:
            total.statistics += math.nan
    return total


def step_report(states: Sequence[Session], weights: Traffic | None = None) -> StepReport:
    """Report the last step of some sessions.

    Args:
        states: the sessions, at least one.
        weights: the traffic of the gather of the updated weights, if it is counted.

    Raises:
        UserError: the sessions' options differ, or no step has ended.
    """
    config = states[0].config
    if any(state.config != config for state in states):
        raise UserError("report(): models are attached with different options; name one: report(model)")
    step = max(state.report.step for state in states)
    if not step:
        raise UserError("report(): no optimizer step has ended yet; call it after optimizer.step()")
    total, weights = sums(states), weights or Traffic()
    signal, noise, gradient, error, non_finite = total.statistics.tolist()
    inside = total.traffic.inside + total.inside_bytes + weights.inside
    waits = [lap() for state in states if (lap := state.report.wait_seconds) is not None]
    measured = not math.isnan(signal)
    return StepReport(
        step=step,
        skipped_steps=max(state.ledger.events.skipped_steps for state in states),
        method=config.method,
        bits=config.bits if config.compresses else None,
        weight_gather=config.weight_gather,
        compressed=total.compressed,
        gradient_bytes=total.traffic.nbytes,
        gradient_bytes_inside_node=total.inside_bytes,
        bits_per_gradient=total.traffic.bits_per_element,
        weight_bytes=weights.nbytes,
        bits_per_weight=weights.bits_per_element,
        error_bytes=sum(state.error_bytes for state in states),
        device_bytes=sum(state.memory.nbytes for state in states)
        + sum(pool.nbytes for pool in {state.workspace.pool for state in states}),
        error_norm=math.sqrt(error) if measured else None,
        gradient_norm=math.sqrt(gradient) if measured else None,
        snr_db=10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None,
        non_finite_blocks=int(non_finite) if measured else None,
        compression_seconds=total.compression_seconds,
        bytes_between_nodes=total.traffic.nbytes + total.inside_bytes + weights.nbytes - inside,
        bytes_inside_node=inside,
        wait_seconds=sum(waits) if waits else None,
    )


def show_log() -> None:
    """Show the log of compression, a few lines per run, unless the script's logging shows it already.

    A script can set the level of the logger "megatron_patch" to show less.
    """
    logger = logging.getLogger("megatron_patch")
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if not shown and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def naive_line(elements: int) -> str:
    """Say why naive is the default without replicas, with the memory that errors would take."""
    return (
        "naive is the default without replicas: method=loco keeps errors of the whole model on every rank, "
        f"{elements * 1.02 / 1e6:.1f} MB here"
    )


def method_line(config: CompressionConfig) -> str:
    """Describe method, code, block size and errors in one line; the method must compress."""
    memory = (
        f"beta {config.beta}, errors in {config.error_dtype}" if config.keeps_errors else "no errors kept"
    )
    code = f"{config.bits} bits ({config.code}{', rotated' if config.rotates else ''})"
    return f"{config.method}, {code}, block {config.block_size}, {memory}"
