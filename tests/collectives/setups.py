"""What an exchange is made with where it stands alone, without a model chunk."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_patch.collectives.exchange import Setup
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig


def setup_of(device: str | torch.device = "cpu", **options: object) -> Setup:
    """A workspace of its own, and senders with the options of CompressionConfig."""
    config, device = CompressionConfig(**{"method": "loco"} | options), torch.device(device)
    return Setup(config, Workspace(device))


def loopback_bytes() -> int:
    """Bytes sent over `lo` since boot, by this machine's own count."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
