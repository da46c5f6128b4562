"""What a payload or an error state says of a bucket's elements."""

from __future__ import annotations

from typing import Any

import torch


def coded_values(layout: Any, blocks: torch.Tensor) -> torch.Tensor:
    """fp32 [N, blocks, b] of a layout -> [N * S] in the bucket's order, rotated where the blocks are; 0 for
    elements that are sent as they are."""
    values = layout.join(blocks).reshape(-1).clone()
    if layout.exact is not None:
        shards = torch.arange(layout.shards)[:, None] * layout.shard_size
        values[(layout.exact.places + shards)[layout.exact.places >= 0]] = 0
    return values
