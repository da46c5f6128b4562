"""What a model chunk tells of its steps: the events since the job began, and the last step's exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_patch.collectives.exchange import Traffic


@dataclass
class Events:
    """How often something out of the ordinary happened to the errors."""

    resets: int = 0
    """Every `reset_interval` steps, once compression has started: e <- 0 in all buckets."""
    skipped_steps: int = 0
    """The optimizer skipped its step (fp16 overflow): the exchange must not count, e <- 0."""
    replays: int = 0
    """A backward pass ran again within one optimizer step, as Megatron's rerun state machine says: e <- 0."""
    repeated_exchanges: int = 0
    """Gradients were exchanged again within one optimizer step, by the loop's design: errors are kept."""
    uncompressed_syncs: int = 0
    """Exchanges of a whole bucket group that bypassed compression (force_all_reduce, before start_step)."""


@dataclass(frozen=True)
class SessionReport:
    """What the last finished step's exchanges were like on this rank."""

    traffic: Traffic = field(default_factory=Traffic)
    compressed: bool = False
    """Whether anything was."""
    statistics: torch.Tensor | None = None
    """fp64 [5], summed over buckets, as loco.STATISTICS; None: nothing was measured."""
    compression_seconds: Callable[[], float] = float
    """Time spent in compressing and decompressing; on CUDA, asking waits for it."""
    inside_bytes: float = 0.0
    """Bytes sent to ranks of the same node by the first of two hops; `traffic` counts the second."""
    step: int = 0
    """Its `steps_seen`; 0: no step has ended."""
