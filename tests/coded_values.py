"""What payloads or an error state say of a bucket's elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patch.loco import INT8
from megatron_patch.quantization.rotation import rotate, rotate_back


def coded_values(layout: Any, blocks: torch.Tensor) -> torch.Tensor:
    """fp32 [N, blocks, b] of a layout -> [N * S] in the bucket's order, rotated where the blocks are; 0 for
    elements that are sent as they are."""
    values = layout.join(blocks).reshape(-1).clone()
    if layout.exact is not None:
        shards = torch.arange(layout.shards)[:, None] * layout.shard_size
        values[(layout.exact.places + shards)[layout.exact.places >= 0]] = 0
    return values


def flat_error(error: Any) -> torch.Tensor:
    """A MovingAverageError, decoded, rotated back, in the bucket's order: fp32 [B] on CPU, without fill."""
    blocks = error.decode().cpu()
    return error.layout.flat(rotate_back(blocks, error.layout) if error.rotated else blocks)


def set_error(error: Any, values: torch.Tensor) -> None:
    """Encode unrotated values, fp32 [B] on CPU, as a MovingAverageError."""
    layout = error.layout
    blocks = layout.cut(values)
    if error.rotated:
        blocks = rotate(blocks, layout)
    if error.dtype == "int8":
        codes, scales = INT8.quantize(blocks)
        stored = {"codes": layout.join(codes).to(torch.int8), "scales": scales.to(torch.bfloat16)}
    else:
        stored = {"values": layout.join(blocks).to(error.tensors()["values"].dtype)}
    error.restore(stored)


def rows_of(layout: Any, payload: torch.Tensor) -> torch.Tensor:
    """The payloads of all shards, which lie end to end, as uint8 [N, payload_bytes], filled with zeros."""
    pieces = payload.reshape(-1).split(layout.payload_sizes)
    return torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)


def decoded(sender: Any, payload: torch.Tensor) -> torch.Tensor:
    """What a sender's payloads decode to, fp32 [N, blocks, b]."""
    return sender.codec.decode(rows_of(sender.layout, payload), sender.layout)


def keep_sent(sender: Any, keep: Callable[[torch.Tensor], None]) -> None:
    """From now on `keep` gets what each of the sender's payloads says, [n]."""
    compress = sender.compress

    def compress_and_keep(gradient: torch.Tensor, payload: torch.Tensor) -> None:
        compress(gradient, payload)
        keep(coded_values(sender.layout, decoded(sender, payload)))

    sender.compress = compress_and_keep


@contextmanager
def sent_codes(sender: Any, entry: dict[str, Any]) -> Iterator[None]:
    """Within the block what the sender's payloads say is kept as `entry["sent"]`."""
    compress = sender.compress
    keep_sent(sender, lambda sent: entry.update(sent=sent))
    try:
        yield
    finally:
        sender.compress = compress
