"""What payloads or an error state say of a bucket's elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def rows_of(layout: Any, payload: torch.Tensor) -> torch.Tensor:
    """The payloads of all shards, which lie end to end, as uint8 [N, payload_bytes], filled with zeros."""
    pieces = payload.reshape(-1).split(layout.payload_sizes)
    return torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)


def decoded(sender: Any, payload: torch.Tensor) -> torch.Tensor:
    """What a sender's payloads decode to, fp32 [N, blocks, b]."""
    return sender.codec.decode(rows_of(sender.layout, payload), sender.layout)


@contextmanager
def sent_codes(sender: Any, entry: dict[str, Any]) -> Iterator[None]:
    """Within the block what the sender's payloads say is kept as `entry["sent"]`."""
    compress = sender.compress

    def keep(gradient: torch.Tensor, payload: torch.Tensor) -> None:
        compress(gradient, payload)
        entry["sent"] = coded_values(sender.layout, decoded(sender, payload))

    sender.compress = keep
    try:
        yield
    finally:
        sender.compress = compress
