"""What an exchange is made with where it stands alone, without a model chunk."""

from __future__ import annotations

import torch

from megatron_patch.collectives.exchange import Setup
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig


def setup_of(device: str | torch.device = "cpu", **options: object) -> Setup:
    """A workspace of its own, and senders with the options of CompressionConfig."""
    config, device = CompressionConfig(**{"method": "loco"} | options), torch.device(device)
    return Setup(config, Workspace(device))
