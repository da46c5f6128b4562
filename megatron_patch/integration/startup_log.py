"""The log of what is on: method and bits, groups of ranks and their sizes, what stays as it is and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.integration.seams.gradients import BucketGroupSeam

logger = logging.getLogger(__name__)


def log_startup(chunk: Any, config: CompressionConfig, seams: Sequence[BucketGroupSeam]) -> None:
    """Log `seams`, those of one rank's model chunks, on one rank of each pipeline stage.

    `chunk` is one of the chunks: its groups say where this rank is.
    """
    if chunk.dp_cp_group.rank() != 0 or chunk.tp_group.rank() != 0:
        return
    pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
    stage = f"pipeline stage {pipeline.rank()}: " if pipeline.size() > 1 else ""
    for level, line in _lines(config, seams):
        logger.log(level, "megatron-loco: %s%s", stage, line)


def _lines(config: CompressionConfig, seams: Sequence[BucketGroupSeam]) -> Iterator[tuple[int, str]]:
    if not config.compresses:
        yield logging.INFO, "method none: Megatron's own gradient exchange"
        return
    memory = f"beta {config.beta}, errors in {config.error_dtype}" if config.has_memory else "no errors kept"
    start = f", from step {config.start_step} on" if config.start_step else ""
    yield logging.INFO, f"{config.method}, {config.bits} bits, block {config.block_size}, {memory}{start}"
    for reason in dict.fromkeys(seam.flat_because for seam in seams if seam.flat_because):
        yield logging.WARNING, f"one hop, not two, for a group of ranks: {reason}"
    found: dict[tuple[str, int], list[int]] = {}
    for seam in seams:
        for collective, ranks, sizes in seam.collectives():
            found.setdefault((collective, ranks), []).extend(sizes)
    for (collective, ranks), sizes in found.items():
        elements = f"{sum(sizes):,} gradient elements in {len(sizes)} bucket{'s' if len(sizes) > 1 else ''}"
        if ranks > 1:
            yield logging.INFO, f"{collective} over {ranks} ranks: {elements}"
        else:
            yield logging.WARNING, f"{collective}: {elements}, not compressed: the group is a single rank"
