"""decompress_reduce of the torch reference: the owner's sum of N senders' payloads, for any codec."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import rotate_back
from megatron_patch.quantization.scales import over


class Reduce(Protocol):
    """decompress_reduce, of whichever backend."""

    def __call__(
        self, payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor
    ) -> None: ...


def decompress(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, one_shard: Reduce
) -> None:
    """Decode one payload for each shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    for index, part in enumerate(output.split(layout.shard_size)):
        shard = layout.part(index)
        one_shard(payloads[index : index + 1, : shard.payload_bytes], codec, shard, part)


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum the N senders' payloads of one shard in fp32, in rank order, into `output` of any float dtype.
    The sum is rotated back where the codec's rotation is the owner's too.

    `payloads` is uint8 [N, payload_bytes] and `layout` that of the shard alone; `output` is [S], or less in a
    short shard; `divisor` is N where Megatron asked for the average, else 1.
    """
    total = codec.decode(payloads[:1], layout)
    for sender in range(1, payloads.shape[0]):
        total = total + codec.decode(payloads[sender : sender + 1], layout)
    if codec.rotation.owner:
        total = rotate_back(total, layout)
    total = layout.join(total)[0, : output.numel()]
    output.copy_(total if divisor == 1 else over(total, divisor))
