"""The records of a model chunk: counts of events since the job began, and the last step's exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_patch.collectives.exchange import Traffic


@dataclass
class Events:
    """Counts of events that affect the errors."""

    resets: int = 0
    """Resets of all errors, e <- 0, every `reset_interval` steps after compression has started."""
    skipped_steps: int = 0
    """Steps that the optimizer skipped (fp16 overflow). Their exchanges must not count, so e <- 0."""
    replays: int = 0
    """Backward passes that Megatron's rerun state machine ran again within an optimizer step; e <- 0."""
    repeated_exchanges: int = 0
    """Further exchanges within one optimizer step, which are the loop's design; errors are kept."""
    uncompressed_syncs: int = 0
    """Exchanges of a whole bucket group without compression (force_all_reduce, before start_step)."""


@dataclass(frozen=True)
class SessionReport:
    """The exchanges of this rank in the last step that has ended."""

    traffic: Traffic = field(default_factory=Traffic)
    compressed: bool = False
    """Whether any exchange was compressed."""
    statistics: torch.Tensor | None = None
    """loco.STATISTICS, fp64 [5], summed over buckets; None if they were not measured."""
    compression_seconds: Callable[[], float] = float
    """Returns the time spent compressing and decompressing; on CUDA the call waits for the work."""
    inside_bytes: float = 0.0
    """Bytes sent to ranks of the same node by hop 1 of two hops; `traffic` counts hop 2."""
    step: int = 0
    """The session's `steps_seen` after this step; 0 if no step has ended."""
