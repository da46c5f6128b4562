"""Logs at start what is compressed: the method, the groups and their sizes, and what is not, and why."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_patch.collectives.two_hop import TwoHopReduceScatter
from megatron_patch.config import AUTO, CompressionConfig
from megatron_patch.megatron import arguments
from megatron_patch.megatron.seams.gradients import BucketGroupSeam
from megatron_patch.megatron.seams.weights import WeightSeam
from megatron_patch.session.onset import FIRST_STAIR
from megatron_patch.session.report import method_line
from megatron_patch.session.session import Session

logger = logging.getLogger(__name__)

_COSTS_BELOW_BITS = 4
"""With fewer bits, error feedback from the first step on costs loss in short runs (docs/ablations.md)."""


def log_startup(
    chunk: Any, session: Session, seams: Sequence[BucketGroupSeam], weight_seams: Sequence[WeightSeam]
) -> None:
    """Log the seams of this rank's model chunks, on one rank of each pipeline stage.

    `chunk` is any of the chunks, whose groups give this rank's place; `session` is its session.
    """
    config = session.config
    if chunk.dp_cp_group.rank() != 0 or chunk.tp_group.rank() != 0:
        return
    pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
    stage = f"pipeline stage {pipeline.rank()}: " if pipeline.size() > 1 else ""
    for level, line in itertools.chain(_lines(session, seams), weight_lines(config, weight_seams)):
        logger.log(level, "megatron-loco: %s%s", stage, line)


def _lines(session: Session, seams: Sequence[BucketGroupSeam]) -> Iterator[tuple[int, str]]:
    config = session.config
    if config.outer_steps:
        yield logging.INFO, _outer_line(config, seams)
    yield from method_lines(config, session.ledger.onset.started)
    if not config.compresses:
        return
    stages = [(seam, stage) for seam in seams for stage in seam.stages]
    for reason in dict.fromkeys(stage.reduction.flat_because for _, stage in stages):
        if reason is not None:
            yield logging.WARNING, f"one hop, not two, for a group of ranks: {reason}"
    yield from _fp32_accumulation_lines(seams)
    by_exchange: dict[tuple[str, str, bool], list[int]] = {}
    for seam, stage in stages:
        ranks = "expert data parallel" if seam.expert else "data parallel"
        instances = " between optimizer instances" if stage is not seam.stages[0] else ""
        exchanges = stage.reduction.exchanges
        how = exchanges[0].describe() if exchanges else stage.kind
        by_exchange.setdefault((f"{ranks} {how}{instances}", stage.of, bool(exchanges)), []).extend(
            contents.numel for contents in stage.contents
        )
    for (exchange, of, compressed), sizes in by_exchange.items():
        buckets = f"{len(sizes)} bucket{'s' if len(sizes) > 1 else ''}"
        line = f"{exchange}: {sum(sizes):,} {of} elements in {buckets}"
        if compressed:
            yield logging.INFO, line
        else:
            yield logging.WARNING, f"{line}, not compressed: the group is a single rank"


def method_lines(config: CompressionConfig, started: bool) -> Iterator[tuple[int, str]]:
    """Yield the log's lines that need no model, each with its logging level."""
    if not config.compresses:
        yield logging.INFO, "method none: Megatron's own gradient exchange"
        return
    yield logging.INFO, method_line(config)
    if not config.is_onebit_adam and not started:
        yield logging.INFO, _start_line(config)
    yield from _early_lines(config)


def _outer_line(config: CompressionConfig, seams: Sequence[BucketGroupSeam]) -> str:
    shards = [
        bucket.grad_data.numel() // seam.group.intra_distributed_optimizer_instance_size
        for seam in seams
        for bucket in seam.group.buckets
    ]
    per_weight = 4 + (4 if config.outer_momentum else 0)  # The anchor and v, in fp32.
    delayed = under_way = ""
    if delay := config.outer_delay:
        turns = min(config.outer_interval // delay, len(shards))
        delayed = f", in {turns} turn{'s' if turns > 1 else ''}, each overlapped with {delay} steps"
        under_way = ", and 8 bytes for each weight whose exchange is under way"
    return (
        f"outer steps: optimizer instances train by themselves, and average {sum(shards):,} weights a rank "
        f"every {config.outer_interval} steps (rate {config.outer_rate}, momentum {config.outer_momentum}), "
        + (f"in {config.bits} bits" if config.compresses else "in fp32")
        + f"{delayed}; this takes {sum(shards) * per_weight / 1e6:.3g} MB a rank{under_way}. With Adam, "
        "multiply the learning rate by the square root of the number of instances (docs/outer_steps.md)"
    )


def _start_line(config: CompressionConfig) -> str:
    if config.start_step != AUTO:
        return f"compression starts after {config.start_step} optimizer steps"
    line = "compression starts when the learning rate has stopped rising"
    if arguments.megatron_flag("optimizer") is None:
        return line
    # Without a warm-up the rate of step 1 is the highest, and the first rate that is not higher shows this.
    steps = arguments.lr_warmup_steps()
    if not steps and arguments.megatron_flag("lr_decay_style") == "constant":
        steps = FIRST_STAIR - 1
    return f"{line}: expected at step {steps + 3}, by Megatron's flags"


def _early_lines(config: CompressionConfig) -> Iterator[tuple[int, str]]:
    """Warn where compression begins in the first steps, while Adam's second moment is young."""
    if config.is_onebit_adam or config.start_step == AUTO:
        return
    warmup = arguments.lr_warmup_steps()
    if int(config.start_step) < warmup:
        yield (
            logging.WARNING,
            f"compression starts within the learning rate's warm-up of {warmup} steps, where it cost most "
            "loss: start_step auto, the default, starts after it",
        )
    elif config.keeps_errors and config.bits < _COSTS_BELOW_BITS and config.start_step == 0:
        yield (
            logging.WARNING,
            f"error feedback with {config.bits} bits from the first step on cost Adam 1 to 3 % of validation "
            "loss in short runs: start_step auto, the default, starts after the learning rate's warm-up",
        )


def _fp32_accumulation_lines(seams: Sequence[BucketGroupSeam]) -> Iterator[tuple[int, str]]:
    if not any(seam.group.ddp_config.reduce_scatter_with_fp32_accumulation for seam in seams):
        return
    exchanges = [exchange for seam in seams for exchange in seam.exchanges]
    of_nodes = any(isinstance(exchange, TwoHopReduceScatter) for exchange in exchanges)
    fp32 = all(b.grad_data.dtype == torch.float32 for seam in seams for b in seam.group.buckets)
    line = "reduce_scatter_with_fp32_accumulation: fulfilled, the owner of a shard sums in fp32"
    if of_nodes and not fp32:
        line += (
            " what nodes send; inside a node gradients are summed in their own precision (topology flat sums "
            "in fp32 there too)"
        )
    yield logging.INFO, line


def how_gathered(config: CompressionConfig, stock_because: str | None) -> str:
    """Return how weights travel; `stock_because` is what traffic.stock_because says of their bucket group."""
    if stock_because is not None:
        return f"Megatron's own: {stock_because}"
    how = "from their changes, exactly"
    if config.weight_gather == AUTO:
        return f"{how}, or Megatron's own: the faster one in turns of both"
    return how if config.codes_weights else f"Megatron's own; {how}, in turns of the trial"


def weight_lines(config: CompressionConfig, seams: Sequence[WeightSeam]) -> Iterator[tuple[int, str]]:
    """Yield the log's lines on the weight gathers, each with its logging level."""
    if not config.codes_weights and not config.takes_turns:
        return
    if not seams:
        yield (
            logging.INFO,
            f"weight_gather {config.weight_gather}: without the distributed optimizer's buffers none is "
            "coded, and a gather of weights, if there is one, is Megatron's own",
        )
    by_ranks: dict[tuple[str, str | None], list[int]] = {}
    for seam in seams:
        size = seam.ranks.size()
        ranks = f"{size} {'expert ' if seam.expert else ''}data parallel rank{'s' if size > 1 else ''}"
        sizes = [bucket.param_data.numel() for bucket in seam.group.buckets]
        by_ranks.setdefault((ranks, seam.stock_because), []).extend(sizes)
    for (ranks, because), sizes in by_ranks.items():
        buckets = f"{sum(sizes):,} weights in {len(sizes)} bucket{'s' if len(sizes) > 1 else ''}"
        yield logging.INFO, f"weight gather over {ranks}: {buckets}, {how_gathered(config, because)}"
